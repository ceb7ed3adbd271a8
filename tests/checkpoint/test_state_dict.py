"""Loading runs no code that a checkpoint brings; random numbers go on."""

import pickle
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from tests.support.tiny import run_folder_of, tiny_tables, train, write_text
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint import state_dict
from torchmars.checkpoint.inference import load_model
from torchmars.checkpoint.initial import init_from
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
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


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "torch.save of a dict"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"])
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


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def former_buffer(rule, betas):
    """Today's name of what Lion and Muon called "momentum" up to version 0.1, and its scale."""
    b1, b2 = betas
    return ("exp_avg", b1 / b2) if rule == "lion" else ("momentum_buffer", b1 * (1 - b1))


def give_former_names(folder, trainer):
    """Write the state of a trainer of Lion and Muon as version 0.1 did."""
    written = state_dict.training_state(
        trainer.layout, trainer.model.weights, trainer.optimizer, {}
    )
    for group in trainer.optimizer.param_groups:
        key, scale = former_buffer(group["rule"], group["betas"])
        for name in group["param_names"]:
            buffer = written.pop(f"optimizer.{name}.{key}")
            written[f"optimizer.{name}.momentum"] = buffer * scale
    dcp.save(written, checkpoint_id=folder)
    manifest = manifests.read(folder)
    for name, words in manifest.optimizer.items():
        manifest.optimizer[name] = f"{words.split()[0]} momentum step"
    manifest.files = {name: manifests.describe(folder / name) for name in manifest.files}
    trainer.layout.on_first(lambda: manifest.write(folder))


def read_former_names(tables):
    """For both roads to a checkpoint: whether it is read as it was; what the second says."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    trainer.run()
    folder = config.run.checkpoints / "step-00000003"
    give_former_names(folder, trainer)
    for group in trainer.optimizer.param_groups:
        group["betas"] = (0.5, 0.5)  # those that the checkpoint was made with count
    kept = state_dict.optimizer_state(trainer.optimizer)
    expected = {name: local(value).clone() for name, value in kept.items()}

    def same(road):
        for value in kept.values():
            value.zero_()
        road()
        return all(
            torch.allclose(local(kept[name]), expected[name], rtol=1e-6, atol=0) for name in kept
        )

    def init():
        return init_from(str(folder), True, trainer.layout, trainer.model, trainer.optimizer)[0]

    return (
        same(lambda: trainer.checkpointer.load(folder)),
        same(init),
        init(),
        {name.rpartition(".")[2] for name in kept},
    )


def test_a_checkpoint_with_former_names_is_read(tmp_path):
    """Of Lion and Muon, whose buffer was scaled by the betas; also under other betas by now."""
    write_text(tmp_path)
    matrix = {"rule": "muon", "betas": [0.95, 0.99]}
    tables = tiny_tables(
        tmp_path,
        training={"steps": 3},
        checkpoint={"verify": "off"},
        optimizer={"name": "lion", "betas": [0.9, 0.98], "matrix": matrix},
    )
    for loaded, initial, said, keys in run_ranks(read_former_names, 2, tables):
        assert loaded and initial and "optimizer's state of 15 of 15 tensors" in said
        assert keys == {"exp_avg", "momentum_buffer", "step"}


def read_with_squared_norms(tables):
    """Return what of the state differs by either road to it, and what the second road says.

    The checkpoint is written as by releases that kept the squared norms of last gradients.
    """
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    trainer.run()
    folder = config.run.checkpoints / "step-00000003"
    written = state_dict.training_state(
        trainer.layout, trainer.model.weights, trainer.optimizer, {}
    )
    lasts = [name for name in written if name.endswith(".last_grad")]
    norm = torch.ones((), dtype=torch.float64)
    dcp.save(written | {f"{name}_squared_norm": norm for name in lasts}, checkpoint_id=folder)
    manifest = manifests.read(folder)
    for name, words in manifest.optimizer.items():
        manifest.optimizer[name] = words.replace("last_grad", "last_grad last_grad_squared_norm")
    manifest.files = {name: manifests.describe(folder / name) for name in manifest.files}
    trainer.layout.on_first(lambda: manifest.write(folder))
    kept = state_dict.optimizer_state(trainer.optimizer)
    expected = {name: local(value).clone() for name, value in kept.items()}

    def differences(road):
        for value in kept.values():
            value.zero_()
        said = road()
        return [n for n in kept if not torch.equal(local(kept[n]), expected[n])], said

    def init():
        return init_from(str(folder), True, trainer.layout, trainer.model, trainer.optimizer)

    return differences(lambda: trainer.checkpointer.load(folder).folder), differences(init)


def test_a_checkpoint_with_squared_norms_is_read(tmp_path):
    """As an earlier release wrote it."""
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"steps": 3}, checkpoint={"verify": "off"})
    for (resumed, _), (initial, (said, without)) in run_ranks(read_with_squared_norms, 2, tables):
        assert not resumed and not initial
        assert "optimizer's state of 15 of 15 tensors" in said and not without


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
