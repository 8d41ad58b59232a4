"""Read JSON schemas in the variants that programs send, and rewrite them so that they can be enforced."""
