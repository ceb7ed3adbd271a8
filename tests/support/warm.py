"""What the first config of a process makes: the server of ranks imports it for all of them."""

from torchmars.config.load import config_from_tables

config_from_tables({"data": {"source": "text", "files": ["x.txt"]}}, "of a test")
