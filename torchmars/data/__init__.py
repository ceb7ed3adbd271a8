"""From text to batches.

Read these in order: documents of a corpus (`corpus`), tokens (`tokenizer`), shards on the disk
(`shards`, made by `prepare`), what they were made from (`sources`), and the loader that reads them
in the global order (`loader`).
"""
