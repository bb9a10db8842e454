"""What stays and what goes: pins, taints, retention, holds of readers, and the collection of what nothing names."""
