"""What speculation costs and gains on this machine, and what to do about it."""
