"""Measure how long verify passes take on this machine, and limit their size."""
