"""Loading runs no code that a checkpoint brings; random numbers go on."""

import pickle
import re
from itertools import product

import pytest
import torch

from tests.support.full import full_but
from tests.support.ranks import run_ranks
from tests.support.tiny import run_folder_of, tiny_tables, train, write_text
from torchmars.checkpoint import state_dict
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.exchange.saved_model import load_model
from torchmars.training.build import build_trainer

RAN = "torchmars_exploit_ran"


class Exploit:
    def __reduce__(self):
        return exec, (f"import builtins; builtins.{RAN} = True",)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    write_text(folder)
    tables = tiny_tables(folder, training={"steps": 2}, checkpoint={"verify": "off"})
    train(2, tables)
    return tables


def resume(tables):
    """What going on with the run says, and whether code of the checkpoint ran on the way."""
    import builtins

    config = config_from_tables(tables, "in a test")
    try:
        build_trainer(config, connection.start(config.parallelism))
        said = "no error"
    except Exception as error:
        said = str(error)
    return said, hasattr(builtins, RAN)


def hostile(kind):
    if kind == "pickle":
        return pickle.dumps(Exploit())
    file = torch.serialization.io.BytesIO()
    torch.save(
        Exploit() if kind == "torch.save" else {"weights": torch.zeros(3), "more": Exploit()}, file
    )
    return file.getvalue()


FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
KINDS = ["pickle", "torch.save", "torch.save of a dict"]
QUICK = [(".metadata", "pickle"), ("__1_0.distcp", "torch.save of a dict")]


@pytest.mark.parametrize("name,kind", full_but(QUICK, product(FILES, KINDS)))
def test_a_hostile_pickle_in_any_file_does_not_run(tables, name, kind):
    """With verification off, damage that the manifest would have shown comes to the readers."""
    file = run_folder_of(tables) / "checkpoints" / "step-00000002" / name
    good = file.read_bytes()
    try:
        if name.endswith(".distcp") and kind != "pickle":  # where the first tensor is read from
            evil = hostile(kind)
            assert len(evil) < len(good)
            file.write_bytes(evil + good[len(evil) :])
        else:
            file.write_bytes(hostile(kind))
        for said, ran in run_ranks(resume, 2, tables):
            assert not ran and re.search(f"step-00000002(/{name}| cannot be read)", said)
        with pytest.raises(UserError, match="step-00000002"):
            load_model(run_folder_of(tables))
    finally:
        file.write_bytes(good)


def test_the_exploit_is_one():
    import builtins

    try:
        pickle.loads(hostile("pickle"))
        assert getattr(builtins, RAN)
    finally:
        delattr(builtins, RAN)


def test_random_numbers_go_on():
    torch.manual_seed(3)
    saved = state_dict.rng_state(0)
    expected = torch.rand(3)
    state_dict.set_rng_state(saved)
    assert torch.equal(torch.rand(3), expected)


def test_seeds_differ_by_every_number():
    draws = []
    for numbers in ((0, 1, 2), (1, 0, 2), (0, 1, 3), (0, 12), (0, 1, 2)):
        state_dict.seed_rng(*numbers)
        draws.append(torch.rand(()).item())
    assert draws[0] == draws[-1] and len(set(draws)) == 4
