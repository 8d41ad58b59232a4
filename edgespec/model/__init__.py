"""Backend-independent interfaces to models: the protocols and facts that every backend provides."""
