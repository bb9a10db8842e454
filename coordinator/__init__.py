"""Attempts, consistent steps and commits: the one writer of a job's log."""
