"""Tool calls: how models write them, parsing them from a streamed reply, and grammars that enforce them."""
