"""`python -m torchmars.train [CONFIG.toml] [--section.key value ...]`: train, or continue, the run of a config.

Started by torchrun it is one rank of many; started alone it trains on one. `./run_train.sh` starts all ranks of a machine.
Exit codes: see torchmars/launch.py.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from torchmars.cluster import connection, process
from torchmars.cluster.signals import follow_launcher
from torchmars.cluster.startup import compare_ranks
from torchmars.config.load import load_config
from torchmars.core.errors import LostRank, exit_on_user_error, last_word, report_failure
from torchmars.training.trainer import Trainer


@record
def main() -> None:
    follow_launcher()
    with exit_on_user_error(
        quiet=process.local_rank() != 0
    ):  # a mistake that one machine alone may find: the launcher must end the others
        config = load_config(sys.argv[1:], "python -m torchmars.train")
        process.check_devices()
    try:
        with exit_on_user_error(quiet=process.rank() != 0):
            store = connection.open_store()
            cluster = compare_ranks(config, store)
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
    sys.exit(last_word(code))


if __name__ == "__main__":
    main()
