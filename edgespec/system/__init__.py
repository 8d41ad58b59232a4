"""Operating system helpers: files, processes, cores and resource limits."""
