"""Trials as jobs of a SLURM cluster."""

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

from torchmars.comparison.study import Study, Trial
from torchmars.comparison.trials import OUTPUT_FILE, write_trial
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.training.preparation import prepare_data

POLL_SECONDS = 10.0
SCRIPT = Path(__file__).parents[2] / "run_train.sh"


class SlurmTrials:
    """Runs each trial as a job of run_train.sh, which puts itself back into the queue.

    A job bears a name of its trial's own. So a comparison that is started again finds in the queue
    what it submitted before.
    """

    def __init__(self, study: Study) -> None:
        """Raises `UserError` if jobs cannot be submitted."""
        self.study = study
        for program in ("sbatch", "squeue"):
            if shutil.which(program) is None:
                raise UserError(
                    f"--slurm: there is no {program} here: start it where jobs are submitted"
                )
        if not SCRIPT.is_file():
            raise UserError(
                f"--slurm: {SCRIPT} is missing: it is in the repository, not in a wheel"
            )
        self.running: dict[str, Trial] = {}
        self.asked = -POLL_SECONDS  # when squeue was asked last

    def describe(self) -> str:
        """Return how trials are run, in words."""
        return "as SLURM jobs, each on one machine"

    def prepare(self) -> None:
        """Make the shards of all trials."""
        prepare_data(self.study.base)

    def start(self, trials: list[Trial]) -> None:
        """Submit the trials that are not in the queue."""
        new = [trial for trial in trials if trial.name not in self.running]
        queued = self.queued() if new else None
        if queued is None:
            return
        for trial in new:
            if self.job_name(trial) not in queued:
                self.submit(trial)
            self.running[trial.name] = trial

    def submit(self, trial: Trial) -> None:
        """Submit a trial. Raises `UserError` if SLURM refuses it."""
        file = write_trial(trial)
        said = subprocess.run(
            [
                "sbatch",
                "--nodes=1",
                f"--job-name={self.job_name(trial)}",
                f"--output={trial.folder / OUTPUT_FILE}",
                str(SCRIPT),
            ],
            env=dict(os.environ) | {"CONFIG_FILE": str(file)},
            capture_output=True,
            text=True,
        )
        if said.returncode:
            raise UserError(f"--slurm: sbatch refuses {trial.name}: {said.stderr.strip()}")

    def job_name(self, trial: Trial) -> str:
        """Return the name of a trial's job, which no other comparison's has."""
        place = hashlib.sha256(str(trial.folder.resolve()).encode()).hexdigest()
        return f"{trial.name}-{place[:12]}"

    def queued(self) -> set[str] | None:
        """Return the names of the jobs in the queue; None if it was asked just now, or fails."""
        if time.monotonic() < self.asked + POLL_SECONDS:
            return None
        self.asked = time.monotonic()
        said = subprocess.run(
            ["squeue", "--noheader", "--me", "--format=%j"], capture_output=True, text=True
        )
        if said.returncode:
            say(f"squeue: {said.stderr.strip()}: asking again", error=True)
            return None
        return {line.strip() for line in said.stdout.splitlines()}

    def ended(self) -> list[tuple[Trial, int | None]]:
        """Return the trials whose jobs have left the queue since. Their exit codes are unknown."""
        queued = self.queued() if self.running else None
        if queued is None:
            return []
        over = [each for each in self.running.values() if self.job_name(each) not in queued]
        for trial in over:
            del self.running[trial.name]
        return [(trial, None) for trial in over]

    def stop(self) -> str:
        """Leave the jobs to SLURM; return that in words."""
        self.running = {}
        return "the jobs continue; scancel ends them"
