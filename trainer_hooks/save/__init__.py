"""Saving: a due step's copy into a slot, at once or beside the next forward and backward, and how a trainer ends."""
