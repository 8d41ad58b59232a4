"""Read heads in the layouts used by their publishers, without executing code from their files."""
