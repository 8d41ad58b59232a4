"""Generate replies: requests, the sessions that decode them, and idle work between replies."""
