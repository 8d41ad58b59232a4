"""Drafters propose tokens, which the target model verifies. Each drafting method has its own module.

The package `edgespec.auto` decides when drafting saves time.
"""
