#!/usr/bin/env python
"""Write the source change for one's own Alpa checkout: python patches/write_diff.py path/to/alpa > hwaware.diff.

Then, in the checkout: git apply hwaware.diff
"""

import argparse
import sys
from pathlib import Path

from hwaware.errors import HwawareError
from hwaware.patching.fork import diff


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the source change for an Alpa checkout.")
    parser.add_argument("checkout", type=Path, help="the folder that holds the package alpa")
    try:
        sys.stdout.write(diff(parser.parse_args().checkout))
    except HwawareError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
