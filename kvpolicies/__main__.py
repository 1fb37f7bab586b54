"""`python -m kvpolicies`: the command line without an installed script."""

import sys

from kvpolicies.cli import main

if __name__ == "__main__":
    sys.exit(main())
