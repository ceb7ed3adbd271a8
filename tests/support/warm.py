"""What the first run in a process makes once: imported by the server of ranks, for all of them."""

import rich.console
import rich.table

from torchmars.config.load import config_from_tables

config_from_tables({"data": {"source": "text", "files": ["x.txt"]}}, "of a warm-up")
