"""spcheck proves that a sequence-parallel model still computes what its reference computes."""

__version__ = "0.1.0"
