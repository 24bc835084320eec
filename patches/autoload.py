#!/usr/bin/env python
"""Make this environment obey HWAWARE_PROFILE: python patches/autoload.py on|off|status [--folder DIR].

The same as `python -m hwaware.autoload`.
"""

import sys

from hwaware.autoload import main

if __name__ == "__main__":
    sys.exit(main())
