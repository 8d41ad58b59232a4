"""A real MCP server, written with the SDK. Its arguments are `stdio` or `http PORT`."""

from __future__ import annotations

import os
import sys
import time
from typing import Literal

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("test tools")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def colour(name: Literal["red", "blue"]) -> str:
    """Describe a colour."""
    return f"{name} is warm" if name == "red" else f"{name} is cold"


@server.tool()
def fail() -> str:
    """Always fail."""
    raise ValueError("no luck today")


@server.tool()
def sleep(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def environment(name: str) -> str:
    """Return an environment variable of the server."""
    return os.environ.get(name, "not set")


@server.tool()
def long_text(characters: int) -> str:
    """Return a long text."""
    return "x" * characters


@server.tool()
def picture() -> Image:
    """Return a picture."""
    return Image(data=b"\x89PNG", format="png")


if __name__ == "__main__":
    if sys.argv[1] == "http":
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
