"""``python -m spcheck``."""

from spcheck.cli import main

main()
