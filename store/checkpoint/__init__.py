"""A checkpoint at rest: its manifest, its indexes, its files and the images in them. It deletes nothing."""
