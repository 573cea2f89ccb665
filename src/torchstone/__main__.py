"""`python -m torchstone` is the command `torchstone`."""

from torchstone.cli import program

program()
