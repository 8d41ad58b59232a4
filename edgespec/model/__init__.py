"""What all other packages see of a model: the protocols and facts that every backend provides."""
