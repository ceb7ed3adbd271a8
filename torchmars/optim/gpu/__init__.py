"""A step by Triton's kernels, on a GPU. Only `launches` can be imported without Triton."""
