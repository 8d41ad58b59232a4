"""Files that edgespec derives from models, such as copies in another quantisation."""
