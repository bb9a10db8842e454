"""The shard image: a rank's tensors and document as bytes of a slot, and how values become bytes and back."""
