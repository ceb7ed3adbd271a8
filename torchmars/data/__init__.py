"""From text to batches: corpus, documents, tokenizer, manifest, prepare, order, windows, loader."""
