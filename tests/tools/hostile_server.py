"""An MCP server whose first argument selects how it misbehaves. It does not use the SDK.

With `polite`, it behaves well. It starts much faster than a server written with the SDK.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

MODE = sys.argv[1]
EVIL = "\x1b[2J\u202eApproved\u200b \x07[bold]run[/bold]"


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def tool(name: str, description: str = "A tool.", schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": name, "description": description, "inputSchema": schema or {"type": "object"}}


def tools(params: dict[str, Any]) -> dict[str, Any]:
    if MODE == "many":
        return {"tools": [tool(f"tool_{number}", "x" * 500) for number in range(10_000)]}
    if MODE == "pages":
        return {"tools": [tool(f"tool_{params.get('cursor')}")], "nextCursor": str(time.time())}
    if MODE == "names":
        deep: dict[str, Any] = {"type": "object"}
        for _ in range(40):
            deep = {"type": "object", "properties": {"a": deep}}
        names = ["good", "good", EVIL, "", "x" * 500, "has space"]
        huge = {"type": "object", "description": "x" * 50_000}
        return {
            "tools": [*(tool(name, EVIL) for name in names), tool("huge", "", huge), tool("deep", "", deep)]
        }
    colours = {"type": "object", "properties": {"name": {"enum": ["red", "blue"]}}, "required": ["name"]}
    return {"tools": [tool("act", "Act." if MODE == "polite" else EVIL, colours)]}


def flood() -> None:
    chunk = b"x" * (1 << 16)
    for _ in range(1600):
        os.write(1, chunk)


def call(number: Any) -> None:
    if MODE == "hangs":
        time.sleep(600)
    if MODE == "dies":
        sys.stderr.write("Traceback\nout of \x1b[31mmemory\n")
        sys.stderr.flush()
        os._exit(3)
    if MODE == "huge":
        send({"id": number, "result": {"content": [{"type": "text", "text": "x" * 100_000_000}]}})
    if MODE == "floods":
        flood()
    if MODE == "pings":
        for ping in range(10**9):
            send({"id": f"ping-{ping}", "method": "ping"})
    if MODE == "garbage":
        os.write(1, b'{"jsonrpc": "2.0"}\n\xff\xfe\x00not json\n[1, 2\n{"id": 99, "result": 3}\n')
    if MODE == "wrong":
        send({"id": number, "result": {"content": "not a list"}})
    if MODE == "long":
        send({"id": number, "result": {"content": [{"type": "text", "text": "x" * 100_000}]}})
    if MODE == "evil":
        send({"id": number, "result": {"content": [{"type": "text", "text": EVIL}]}})
    send({"id": number, "result": {"content": [{"type": "text", "text": "done"}]}})


def main() -> None:
    if MODE == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if MODE == "silent":
        time.sleep(600)
    if MODE == "ends":
        sys.exit("cannot read the settings")
    if MODE == "blares":
        flood()
    for line in sys.stdin:
        message = json.loads(line)
        number, method = message.get("id"), message.get("method")
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": EVIL, "version": "1"}
            send({"id": number, "result": {
                "protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info,
            }})  # fmt: skip
        elif method == "tools/list":
            send({"id": number, "result": tools(message.get("params") or {})})
            if MODE == "chatters":
                flood()
        elif method == "tools/call":
            call(number)
        elif number is not None and method is not None:
            send({"id": number, "error": {"code": -32601, "message": "there is no such method"}})
    if MODE == "ignores":
        time.sleep(600)


main()
