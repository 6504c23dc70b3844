"""What runs on every rank: build the pair, probe, align, measure."""
