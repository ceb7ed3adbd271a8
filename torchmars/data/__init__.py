"""From text to batches: tokenizers, corpora, shards on disk and the loader that reads them in the global order."""
