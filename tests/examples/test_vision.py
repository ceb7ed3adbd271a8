"""examples/vision.py learns from images that the test makes, in CIFAR's binary format."""

import importlib.util
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.docs.pages import ROOT
from tests.support.full import full_but
from torchmars.begin import install_command
from torchmars.optim.roles import roles

spec = importlib.util.spec_from_file_location("vision", ROOT / "examples" / "vision.py")
vision = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vision)

COUNT = 32


def make_cifar(folder, classes):
    """Make a training and a test split of noise that is brighter the higher the label's channel."""
    random = np.random.default_rng(0)
    before, train, test = vision.FILES[classes]
    for name in (train.replace("*", "1"), test):
        labels = random.integers(3, size=COUNT)
        images = random.integers(60, size=(COUNT, 3, 32, 32))
        images[np.arange(COUNT), labels] += 150
        coarse = np.full((COUNT, before - 1), 99)
        rows = np.concatenate([coarse, labels[:, None], images.reshape(COUNT, -1)], axis=1)
        rows.astype(np.uint8).tofile(folder / name)


def figures(capsys, *words):
    """The numbers of each epoch: loss, test loss, accuracy."""
    vision.main(list(words))
    return [
        list(map(float, re.findall(r"\d+\.\d+", line)))
        for line in capsys.readouterr().out.splitlines()
    ]


LEARNERS = [
    (model, width, rule)
    for model, width in [("resnet18", 8), ("vit", 48)]
    for rule in ("mars-adamw", "mars-m")
]


@pytest.mark.parametrize("model,width,rule", full_but([LEARNERS[0], LEARNERS[3]], LEARNERS))
def test_learns(tmp_path, capsys, model, width, rule):
    make_cifar(tmp_path, 10)
    words = f"--data {tmp_path} --model {model} --width {width} --rule {rule} --epochs 10"
    epochs = figures(capsys, *words.split())
    losses = [loss for loss, *_ in epochs]
    assert len(epochs) == 10 and losses[-1] < 0.5 * losses[0], losses


def test_every_rule_takes_a_step_on_100_classes(tmp_path, capsys):
    """At width 4, torch 2.13 dies of a segmentation fault on CPUs with AVX2 alone (oneDNN 3.12)."""
    make_cifar(tmp_path, 100)
    for rule in vision.RATES:
        words = f"--data {tmp_path} --classes 100 --width 8 --rule {rule} --epochs 1"
        [[loss, _, _]] = figures(capsys, *words.split())
        assert 2 < loss < 8


def test_images_are_read_as_they_were_written(tmp_path):
    for classes in (10, 100):
        make_cifar(tmp_path, classes)
        images, labels = vision.read_split(tmp_path, classes, True, False)
        assert images.shape == (COUNT, 3, 32, 32) and images.dtype == torch.uint8
        assert torch.equal(images.float().mean(dim=(2, 3)).argmax(1), labels)


def test_torchvision_gives_the_same(tmp_path, monkeypatch, capsys):
    """A stand-in for it, with images as it has them."""
    make_cifar(tmp_path, 10)
    images, labels = vision.read_split(tmp_path, 10, True, False)

    def cifar10(root, train, download):
        assert (root, train, download) == (str(tmp_path), True, True)
        data = images.permute(0, 2, 3, 1).numpy()
        return SimpleNamespace(data=data, targets=labels.tolist())

    datasets = SimpleNamespace(CIFAR10=cifar10)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(datasets=datasets))
    got = vision.read_split(tmp_path, 10, True, True)
    assert torch.equal(got[0], images) and torch.equal(got[1], labels)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SystemExit) as ended:
        vision.read_split(tmp_path, 10, True, True)
    assert ended.value.code == 2
    needed = f"error: --download needs the package torchvision: {install_command('vision')}\n"
    assert capsys.readouterr().err == needed


def test_augmentation_flips_and_moves_by_up_to_4():
    torch.manual_seed(0)
    pixel = torch.zeros(200, 3, 32, 32, dtype=torch.uint8)
    pixel[:, :, 10, 12] = 7
    moved = vision.augmented(pixel)
    assert moved.shape == pixel.shape and moved.dtype == torch.uint8
    _, channels, rows, cols = moved.nonzero(as_tuple=True)
    assert len(rows) == 600 and channels.bincount().tolist() == [200] * 3
    assert set(rows.tolist()) == set(range(6, 15))
    assert set(cols.tolist()) == {*range(8, 17), *range(15, 24)}


def test_roles_are_those_that_the_example_names():
    found = roles(vision.resnet18(10, 8))
    assert list(found.values()).count("convolution") == 20 and found["12.weight"] == "head"
    found = roles(vision.ViT(10, 48))
    assert found["patch_embed.weight"] == "convolution" and found["pos_embed"] == "embedding"
    assert found["head.weight"] == "head"


def test_a_folder_without_data(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        vision.main(["--data", str(tmp_path)])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and "has no data_batch_*.bin" in err and err.count("\n") == 1


def test_it_is_short():
    assert len((ROOT / "examples" / "vision.py").read_text().splitlines()) < 150
