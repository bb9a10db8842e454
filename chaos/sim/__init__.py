"""The deterministic simulator: virtual time, a hostile world, and an oracle that watches."""
