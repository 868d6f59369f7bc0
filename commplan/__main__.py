"""Entry point of `python -m commplan`."""

import sys

from commplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
