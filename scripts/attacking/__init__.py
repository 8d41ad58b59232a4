"""Attack the running server with hostile clients."""
