"""The option that all benchmarks share: ``--smoke``, every line of the table from small sizes and one round."""

import argparse


def parser(doc):
    """A command line with a benchmark's own docstring as its help."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--smoke", action="store_true", help="small sizes, one round: whether it runs, not what it costs")
    return made
