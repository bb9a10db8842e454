"""Toprope: fault tolerance and checkpoints for distributed PyTorch training."""

__version__ = "0.1.0"
