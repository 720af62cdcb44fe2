# SPDX-License-Identifier: Apache-2.0
"""The program `paceline`, also as `python -m paceline`."""

import sys


def main() -> int:
    """Runs the command line; a Ctrl-C while it is imported ends it as one later does."""
    try:
        from paceline import cli
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
