"""Generate one reply: its request, the session that decodes it, and the idle work between replies."""
