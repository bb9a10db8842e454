"""Real processes on one machine: start them, watch them, kill them."""
