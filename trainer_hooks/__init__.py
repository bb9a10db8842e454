"""The part that lives in the trainer: capture, hand-over and restore. Standard library and torch only."""
