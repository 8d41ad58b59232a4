"""Subjects with planted bugs, which the fuzzer must find."""
