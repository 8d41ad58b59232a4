"""Run a model on several machines, with a server on each worker and connections from the model to them."""
