"""Read the metadata of model files, without loading a model."""
