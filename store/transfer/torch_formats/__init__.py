"""The formats that need PyTorch to be written or read: the one room of the store that imports it."""
