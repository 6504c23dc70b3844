"""What a dataflow should do, from tables of the tool computed from the case; never from what a subject says."""
