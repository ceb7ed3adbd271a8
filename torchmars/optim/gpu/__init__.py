"""A step by Triton's kernels, on a GPU. Only `choice` and `launches` can be
imported without Triton."""
