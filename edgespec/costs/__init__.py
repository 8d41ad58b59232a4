"""Costs of verify passes on this machine: measured curves and the limits of a pass."""
