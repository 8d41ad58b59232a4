"""All options, each declared exactly once, and the files that set them."""
