"""What the pickle of an index may ask for."""

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from torchmars.checkpoint.reader import IndexUnpickler


class Attribute:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an enum, if `of` is one."""

    def __init__(self, of, name):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


def read(value):
    return IndexUnpickler(io.BytesIO(pickle.dumps(value))).load()


def test_members_of_enums_are_read_as_any_python_writes_them():
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert read(Attribute(_MEM_FORMAT_ENCODING, member.name)) is member
    assert read(member) is member
    assert read(TensorProperties(dtype=torch.float32)).dtype == torch.float32


@pytest.mark.parametrize(
    "of,name",
    [
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "mro"),
        (torch.Size, "__mul__"),
        (torch.float32, "to_real"),
    ],
)
def test_no_other_attribute_is_read(of, name):
    with pytest.raises(pickle.UnpicklingError, match="asks for an attribute"):
        read(Attribute(of, name))
