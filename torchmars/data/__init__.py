"""From text to batches.

Read these in order: the files of a corpus (`corpus`), how they are cut and read (`reading`),
documents and their tokens (`documents`, `tokenizer`), shards on the disk (`manifest`, `writer`),
who makes them (`prepare`, or another program, `foreign`), samples, as a stream or packed
(`windows`), their corpora (`mixture`), their global order (`order`), and the loader that reads them
(`loader`).
"""
