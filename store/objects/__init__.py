"""Object stores: one protocol, and what implements it."""
