"""`python -m torchmars.train [CONFIG.toml] [--section.key value ...]`: train, or continue, the run of a config.

Started by torchrun it is one rank of many; started alone it trains on one. `./run_train.sh` starts all ranks of a machine.
Exit codes: see torchmars/launch.py.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from torchmars.config_file import load_config
from torchmars.errors import LostRank, last_word, report_failure, reported
from torchmars.parallel import mesh
from torchmars.signals import follow_launcher
from torchmars.startup import compare_ranks
from torchmars.trainer import Trainer


@record
def main() -> None:
    follow_launcher()
    with reported(
        quiet=mesh.local_rank() != 0
    ):  # a mistake that one machine alone may find: the launcher must end the others
        config = load_config(sys.argv[1:], "python -m torchmars.train")
        mesh.check_devices()
    try:
        with reported(quiet=mesh.rank() != 0):
            store = mesh.meet()
            cluster = compare_ranks(config, store)
            layout = mesh.start(config.parallelism, store)
            if cluster:
                layout.say(cluster)
            code = Trainer(config, layout).run()
    except SystemExit as exit:
        code = exit.code
    except LostRank as error:  # a line instead of a traceback
        report_failure(error)
        sys.exit(1)
    finally:
        mesh.stop()
    sys.exit(last_word(code))


if __name__ == "__main__":
    main()
