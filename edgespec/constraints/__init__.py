"""Constrain replies to a JSON schema, a regular expression, a grammar or a list of choices."""
