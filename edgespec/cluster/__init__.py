"""Run a model across several machines: the server on each worker, and the connections to the workers."""
