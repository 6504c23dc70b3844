"""What this machine can run: facts about it, and one real case on each backend that should work."""
