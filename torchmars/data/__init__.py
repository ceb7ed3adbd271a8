"""From text to batches.

Read these in order: the files of a corpus and their records (`corpus`), documents and their tokens
(`documents`, `tokenizer`), shards on the disk (`manifest`), who makes them (`prepare`, or another
program, `foreign`), samples, as a stream or packed, of one corpus or several (`windows`), their
global order (`order`), and the loader that reads them (`loader`).
"""
