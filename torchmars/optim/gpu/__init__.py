"""A step by Triton's kernels, on a GPU. Its modules need Triton."""
