"""From text to batches.

Read these in order: the files of a corpus (`corpus`), how they are cut and read (`reading`, `hub`),
documents and their tokens (`documents`, `tokenizer`), shards on the disk (`manifest`, `writer`),
who makes them (`prepare`, or another program, `foreign`), samples (`windows`; `packing` where
documents are fitted into windows), their corpora (`mixture`, `shares`), their global order
(`order`), and the loader that reads them (`loader`).
"""
