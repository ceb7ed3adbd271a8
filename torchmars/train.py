"""`python -m torchmars.train [CONFIG.toml] [--section.key value ...]`: train, or continue, the run of a config.

Started by torchrun it is one rank of many; started alone it trains on one. `./run_train.sh` starts all ranks of a machine.
Exit codes: see torchmars/launch.py.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from torchmars.cluster import connection, process
from torchmars.cluster.signals import follow_launcher
from torchmars.cluster.startup import check_ranks
from torchmars.config.load import load_config
from torchmars.core.errors import LostRank, leave_exit_code, report_failure, reported
from torchmars.training.trainer import Trainer


@record
def main() -> None:
    follow_launcher()
    with reported(
        quiet=process.local_rank() != 0
    ):  # a mistake that one machine alone may find: the launcher must end the others
        config = load_config(sys.argv[1:], "python -m torchmars.train")
        process.check_devices()
    try:
        with reported(quiet=process.rank() != 0):
            store = connection.open_store()
            cluster = check_ranks(config, store)
            layout = connection.start(config.parallelism, store)
            if cluster:
                layout.say(cluster)
            code = Trainer(config, layout).run()
    except SystemExit as exit:
        code = exit.code
    except LostRank as error:  # a line instead of a traceback
        report_failure(error)
        sys.exit(1)
    finally:
        connection.stop()
    sys.exit(leave_exit_code(code))


if __name__ == "__main__":
    main()
