"""Tools from MCP (Model Context Protocol) servers that the model can call in the terminal chat."""
