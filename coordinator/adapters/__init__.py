"""How a coordinator reaches the world: each module does one kind of input and output."""
