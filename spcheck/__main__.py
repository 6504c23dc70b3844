"""``python -m spcheck``, and the console script."""

import sys


def main() -> None:
    """The command line; a Ctrl-C while it is still being imported ends like one later."""
    try:
        from spcheck.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
