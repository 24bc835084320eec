"""Run the command line: `python -m hwaware` is `hwaware`."""

from hwaware.cli import main

main(prog_name="hwaware")
