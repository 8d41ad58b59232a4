"""Drafting methods. Drafters propose tokens, which the target verifies. `auto` decides when to draft."""
