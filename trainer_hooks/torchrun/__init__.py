"""What torchrun lacks: safe settings, a rendezvous store of its own, ranks that end with their agent and say why."""
