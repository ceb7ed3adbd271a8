"""`python -m torchmars.train [CONFIG.toml] [--section.key value ...]`: train, or continue, the run of a config.

Started by torchrun it is one rank of many; started alone it trains on one. `./run_train.sh` starts all ranks of a machine.
Exit codes: see torchmars/launch.py.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from torchmars.config_file import load_config
from torchmars.errors import reported
from torchmars.launch import leave
from torchmars.parallel import mesh
from torchmars.trainer import Trainer


@record
def main() -> None:
    with reported(quiet=mesh.local_rank() != 0):  # a mistake that one node alone may find: the launcher must end the others
        config = load_config(sys.argv[1:], "python -m torchmars.train")
        layout = mesh.start(config.parallelism)
    try:
        with reported(quiet=not layout.first):
            code = Trainer(config, layout).run()
    except SystemExit as exit:
        code = exit.code
    finally:
        mesh.stop()
    leave(code)


if __name__ == "__main__":
    main()
