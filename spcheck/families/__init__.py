"""What a model family should do, as tables: a folder for each family."""
