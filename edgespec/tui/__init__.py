"""The terminal chat, a Textual app built on edgespec's public API."""
