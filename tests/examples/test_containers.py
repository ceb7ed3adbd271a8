"""The files for containers: checked where their tools are installed."""

import shutil
import subprocess

import pytest
import yaml

from tests.docs.pages import ROOT
from torchmars.cluster.environment import Environment, read_environment
from torchmars.config.load import load_config
from torchmars.core.errors import EXIT_MISTAKE, EXIT_STOPPED, EXIT_UNCONNECTED

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


def test_the_elastic_job_meets_at_its_rendezvous_and_knows_the_exit_codes():
    service, store, job = yaml.safe_load_all((FOLDER / "elastic.yaml").read_text())
    labels = store["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == store["spec"]["selector"]["matchLabels"] == labels
    [node] = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "a secret") for each in node["env"]}
    assert set(variables) <= set(Environment.__dataclass_fields__)
    environment = read_environment(variables)
    [port] = service["spec"]["ports"]
    assert environment.RDZV_ENDPOINT == f"{service['metadata']['name']}:{port['port']}"
    assert environment.NNODES.most == job["spec"]["parallelism"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = {
        rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule
    }
    assert codes == {"FailJob": [EXIT_MISTAKE], "Ignore": [EXIT_UNCONNECTED, EXIT_STOPPED]}
    config = load_config(node["args"][1:], "torchmars train")
    assert config.checkpoint.memory_interval == 1  # a lost pod costs two steps at most
