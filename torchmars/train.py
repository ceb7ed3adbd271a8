"""`python -m torchmars.train CONFIG.toml [--section.key value ...]`: one rank of a run.

torchrun starts one for each GPU; a process that is started alone trains alone. `torchmars train`
starts all ranks of a machine. Exit codes: see torchmars/commands/launch.py.
"""

import os
import sys
from functools import partial

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from torchmars.cluster import process
from torchmars.cluster.environment import keep_compiled_in
from torchmars.config.load import load_config, require_config
from torchmars.core.console import unless_done_in
from torchmars.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_MISTAKE,
    EXIT_UNCONNECTED,
    Ended,
    LoneMistake,
    LostRank,
    end_at_once,
    exit_on_user_error,
    leave_exit_code,
    report_failure,
)

# How long a rank may take to leave the others once the run has ended.
LEAVE_SECONDS = 60.0


@record
def main() -> None:
    """Train, or continue, the run of the command line's config; end the process."""
    process.follow_launcher()
    # A mistake that one machine alone may find: its launcher must end the others.
    with exit_on_user_error(quiet=os.environ.get("LOCAL_RANK", "0") != "0"):
        config = load_config(sys.argv[1:], "python -m torchmars.train")
        require_config(sys.argv[1:])
        process.check_devices()
        keep_compiled_in(config.run.compile_cache)
        from torchmars.cluster import connection  # it brings torch's compiler
        from torchmars.training.build import apply_determinism, build_trainer

        apply_determinism(config.training)

    try:
        # One rank alone may leave: as a crash, so that the launcher ends the others.
        with exit_on_user_error(quiet=process.rank() != 0):
            layout = connection.start(config.parallelism)
            if cluster := connection.check_ranks(config, layout):
                layout.say(cluster)
            code = build_trainer(config, layout).run()
    # The other ranks may wait for this one in a collective of NCCL: leaving the process group would
    # wait for them in turn. So a failure is told, and then the process ends as it is.
    except Ended as ended:
        code = ended.code if isinstance(ended.code, int) else 1
        # Ctrl-C ended this rank alone: how the run ends is for its launcher to say.
        end_at_once(code if code == EXIT_INTERRUPTED else leave_exit_code(code))
    except (LostRank, LoneMistake) as error:  # a line instead of a traceback
        report_failure(error)
        end_at_once(EXIT_UNCONNECTED if isinstance(error, LostRank) else EXIT_MISTAKE)
    except torch.OutOfMemoryError as error:
        report_failure(out_of_memory(error))
        end_at_once(1)
    except BaseException as error:  # DCP's own are no Exception, nor is a plugin's sys.exit
        report_failure(error, crash=True)
        end_at_once(1)
    code = leave_exit_code(code)
    with unless_done_in(LEAVE_SECONDS, partial(end_at_once, code)):
        connection.stop()
    sys.exit(code)


def out_of_memory(error: torch.OutOfMemoryError) -> LoneMistake:
    """Return one line: this rank needs more memory than its GPU has, and the remedy."""
    wanted = str(error).partition(" GPU ")[0]
    return LoneMistake(
        f"rank {process.rank()} on {process.node()} ran out of GPU memory ({wanted}): lower "
        'training.microbatch_size, set activation_checkpoint.mode = "full", or take more ranks; '
        "torchmars plan says what each needs, and profiler.memory = true what had it"
    )


if __name__ == "__main__":
    main()
