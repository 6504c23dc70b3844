"""Plain DeepSeek V3.2 with its MTP layer, written to be read beside the specification.

``reference.config`` needs no torch; ``reference.subject`` is what spcheck runs.
"""
