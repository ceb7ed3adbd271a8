"""`python -m torchmars.checkpoint` is `torchmars checkpoint`."""

from torchmars.commands.checkpoint import main

main()
