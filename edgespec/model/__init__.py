"""The backend-independent view of models: the protocols and facts that every backend provides."""
