"""Files made once from a model: what its drafts need and the model's own file does not give."""
