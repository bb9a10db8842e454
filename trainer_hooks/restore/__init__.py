"""Restoring: the ranks agree on an attempt, fetch what each needs of its source, check all of it, then apply it."""
