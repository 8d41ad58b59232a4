"""Tool calling: the formats that models use, a streaming parser, and grammars that enforce valid calls."""
