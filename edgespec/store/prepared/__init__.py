"""Files that edgespec derives from models, such as requantised copies."""
