"""torchmars: pretraining of large models with the MARS family of optimizers."""
