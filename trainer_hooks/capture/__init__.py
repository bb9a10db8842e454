"""What a trainer's state consists of, under which names, and which rank stores what of it."""
