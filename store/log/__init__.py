"""The job log: its records, the chain that holds them in order, and what they add up to."""
