"""Models on this machine and on the hub, and data that is saved between runs."""
