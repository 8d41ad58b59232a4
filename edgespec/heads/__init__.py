"""Read published heads, in all the layouts in which they come. Never executes code in their files."""
