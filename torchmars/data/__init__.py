"""From text to batches.

Read these in order: the files and pieces of a corpus (`corpus`), how they are read (`reading`,
`rows`), documents and their tokens (`documents`, `tokenizer`), shards on the disk (`manifest`,
`writer`, `shards`, made by `prepare` with `plan`, `workers` and `finish`, or by another program,
`foreign`), what they were made from (`sources`), samples (`windows`; `packing` and `packed` where
windows are filled with documents that fit), the corpora that they are of (`mixture`), their global
order (`order`), and the loader that reads them (`loader`).
"""
