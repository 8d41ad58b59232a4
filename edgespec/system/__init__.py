"""Files, processes, cores and the limits of this machine."""
