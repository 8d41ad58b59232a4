"""Test edgespec with damaged and hostile inputs. `scripts/fuzz --help` describes the use."""
