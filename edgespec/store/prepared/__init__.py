"""Files that edgespec makes from models, such as copies in another quantisation, and their records."""
