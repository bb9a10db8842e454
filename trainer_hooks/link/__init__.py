"""The link to the sidecar: its frames, its socket, the slots that it lends and the shards that it stages."""
