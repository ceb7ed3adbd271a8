"""The files for containers: checked where their tools are installed."""

import shutil
import subprocess

import pytest
import yaml

from tests.docs.pages import ROOT
from torchmars.cluster.environment import Environment

FOLDER = ROOT / "examples" / "containers"


def test_the_dockerfile_has_nothing_to_blame():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed")
    subprocess.run(["hadolint", str(FOLDER / "Dockerfile")], check=True)


def test_the_trainjob_is_one():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
    assert models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest


def test_the_trainjob_sets_variables_that_there_are():
    [script] = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())["spec"]["trainer"]["args"]
    exported = script.removeprefix("export ").partition(";")[0].split()
    assert {each.partition("=")[0] for each in exported} <= set(Environment.__dataclass_fields__)
