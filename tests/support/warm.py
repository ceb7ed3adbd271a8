"""What the first config of a process makes: the server of ranks imports it for all of them."""

import gc

from torchmars.config.load import config_from_tables

config_from_tables({"data": {"source": "text", "files": ["x.txt"]}}, "of a test")
# A collection in a rank would else look at all that torch has made, and copy each page of it.
gc.collect()
gc.freeze()
