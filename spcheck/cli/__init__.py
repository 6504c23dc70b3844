"""The command line: the only place that reads options and prints."""
