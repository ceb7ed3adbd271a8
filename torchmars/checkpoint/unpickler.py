"""Reads the pickle of an index without running code that it brings."""

import pickle
from typing import Any


class IndexUnpickler(pickle.Unpickler):
    """Reads the index of a checkpoint and nothing else.

    Loading must not run code that a checkpoint brings. The class of pickled Python objects is left
    out as well: DCP would unpickle those without restriction.
    """

    ALLOWED = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "WindowsPath"},
        "pathlib._local": {"PosixPath", "WindowsPath"},
        "torch": {
            "Size",
            "float64",
            "float32",
            "float16",
            "bfloat16",
            "uint8",
            "int64",
            "int32",
            "bool",
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index holds")
        return super().find_class(module, name)
