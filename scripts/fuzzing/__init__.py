"""Fuzz edgespec with damaged and hostile inputs. See `scripts/fuzz --help`."""
