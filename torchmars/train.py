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
    try:
        with reported(quiet=mesh.rank() != 0):
            config = load_config(sys.argv[1:], "python -m torchmars.train")
            layout = mesh.start(config.parallelism)
            try:
                code = Trainer(config, layout).run()
            finally:
                mesh.stop()
    except SystemExit as exit:
        code = exit.code
    leave(code)


if __name__ == "__main__":
    main()
