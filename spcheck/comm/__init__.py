"""Communicators: what a subject sends rows through, over threads of one process or over torch.distributed."""
