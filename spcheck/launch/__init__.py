"""Starting ranks, and bringing back what they report: a parent without torch, a host that imports it once."""
