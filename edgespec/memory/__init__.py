"""The memory that target, draft and their caches are given."""

from edgespec.memory.budget import available_bytes, parse_size, peak_bytes, resident_bytes

__all__ = ["available_bytes", "parse_size", "peak_bytes", "resident_bytes"]
