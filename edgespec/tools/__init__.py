"""Tools of MCP servers (Model Context Protocol), which the terminal chat offers to the model."""
