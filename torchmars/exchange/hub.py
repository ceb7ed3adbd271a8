"""Names after "hf:": each is a folder of transformers, or a model of Hugging Face's hub."""

import os
import re
from pathlib import Path
from typing import Any

from torchmars.config.checkpoint import HF
from torchmars.core.errors import UserError, needs_package
from torchmars.data.hub import distrust_hub, in_a_line

NAME = re.compile(r"([\w-][\w.-]*(?:/[\w.-]+)?)(?:@([\w./-]+))?")  # NAME or NAME@REVISION
# All that is read of a model. Nothing else is fetched, so that no pickle is.
FILES = [
    *("config.json", "adapter_config.json", "generation_config.json"),
    *("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
]


def is_of_hub(source: str) -> bool:
    """Return whether a name after "hf:" is none of a folder, and may be one of the hub."""
    name = source.removeprefix(HF)
    return name != source and NAME.fullmatch(name) is not None and not os.path.lexists(name)


def find_folder(source: str) -> tuple[Path, str]:
    """Return the folder of a path, or of "hf:" and a name, and the name for checkpoint.init_from.

    A model of the hub is fetched into the hub's own cache, as far as it is not there. Its name has
    the commit, so that it means the same weights for good. Raises `UserError`.
    """
    name = source.removeprefix(HF)
    if not is_of_hub(source):
        folder = Path(os.path.expanduser(name))
        return folder, f"{HF}{folder.resolve()}"
    what = f"there is no folder {name}: the model of the hub"
    with needs_package("huggingface_hub", what):
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm
    distrust_hub()

    class BytesBar(tqdm):
        """The library has three bars: this is the one of all bytes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            ours = kwargs.get("unit") == "B" and "transfer" not in kwargs.get("name", "")
            super().__init__(*args, **kwargs | ({} if ours else {"disable": True}))

    repository, _, revision = name.partition("@")
    try:
        fetched = snapshot_download(
            repository, revision=revision or None, allow_patterns=FILES, tqdm_class=BytesBar
        )
    except UserError:  # what the hub answers is not to be trusted
        raise
    except Exception as error:  # whatever its network, its cache or the hub have raised
        raise UserError(
            f"{what} cannot be fetched ({in_a_line(error)}): check the name and the network, and "
            "for a model that asks for consent HF_TOKEN"
        ) from None
    folder = Path(fetched)  # the cache has one for each commit
    return folder, f"{HF}{repository}@{folder.name}"
