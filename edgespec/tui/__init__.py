"""The terminal chat: a textual app over the public API."""
