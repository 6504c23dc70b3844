"""From what the ranks measured to a verdict. Reads results only. No torch."""
