"""Memory management: determine the memory budget, plan what to load, and cache prefixes."""
