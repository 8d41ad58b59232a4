"""Drafters: one module per method of drafting. They propose tokens; `edgespec.auto` decides when to draft."""
