"""The secret that the jobs of an array find in the run's folder."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.mistakes import mistake
from torchmars.cluster.shared_secret import shared_secret


def test_jobs_that_start_at_once_have_one_secret_and_nobody_else_has(tmp_path):
    folder = tmp_path / "runs" / "books"
    with ThreadPoolExecutor(16) as jobs:
        [secret] = set(jobs.map(lambda _: shared_secret(folder, "7"), range(64)))
    assert len(secret) == 64 and shared_secret(folder, "8") != secret
    file = folder / "token-7"
    assert file.read_text() == secret and file.stat().st_mode & 0o777 == 0o600
    assert {each.name for each in folder.iterdir()} == {"token-7", "token-8"}


@pytest.mark.parametrize("mode", [0o644, 0o620])
def test_a_secret_that_others_can_see_is_refused(tmp_path, mode):
    shared_secret(tmp_path, "7")
    (tmp_path / "token-7").chmod(mode)
    assert "token-7, the secret of the array's jobs" in mistake(shared_secret, tmp_path, "7")


def test_a_link_to_a_file_of_somebody_else_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("known")
    (tmp_path / "token-7").symlink_to(tmp_path / "other")
    assert "token-7, the secret of the array's jobs" in mistake(shared_secret, tmp_path, "7")
