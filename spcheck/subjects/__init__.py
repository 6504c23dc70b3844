"""What may stand on a side of the pair."""
