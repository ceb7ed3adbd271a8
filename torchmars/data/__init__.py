"""From text to batches.

Read these in order: the files of a corpus (`corpus`), how they are cut and read (`reading`, `rows`,
`hub`), documents and their tokens (`documents`, `tokenizer`), shards on the disk (`manifest`,
`writer`, `shards`), who makes them (`prepare`, or another program, `foreign`), samples (`windows`;
`packing` and `packed` where documents are fitted into windows), their corpora (`mixture`), their
global order (`order`), and the loader that reads them (`loader`).
"""
