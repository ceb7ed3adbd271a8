"""From text to batches.

Read these in order: the files and pieces of a corpus (`corpus`), how they are read (`reading`,
`rows`), documents and their tokens (`documents`, `tokenizer`), shards on the disk (`manifest`,
`writer`, `shards`), who makes them (`prepare` with `corpus_plan`, `workers` and `finish`, or
another program, `foreign`), what they were made from (`sources`), samples (`windows`; `packing` and
`packed` where documents are fitted into windows), their corpora (`mixture`), their global order
(`order`), and the loader that reads them (`loader`).
"""
