"""How the ports are met on a real machine."""
