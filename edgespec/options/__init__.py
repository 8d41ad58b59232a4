"""All options, each declared once, and the files that set them."""
