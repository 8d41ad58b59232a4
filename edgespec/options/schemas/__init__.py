"""Read JSON schemas as programs write them, and rewrite them so that they can be enforced."""
