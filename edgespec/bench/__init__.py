"""Benchmarks that compare methods with plain decoding: measurements, statistics, tables and plots."""
