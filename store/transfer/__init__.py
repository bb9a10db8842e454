"""Checkpoints on their way out of a store and into one: restore, export, import, copy."""
