"""One per node: owns the slots, hashes what is sealed in them, and carries it through the tiers."""
