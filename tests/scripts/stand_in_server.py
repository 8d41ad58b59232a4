"""A fake llama-server with the same flags. Its file name selects its behaviour."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ANSWER = {
    "content": "abc",
    "tokens": [7, 8, 9],
    "stop_type": "limit",
    "timings": {
        "cache_n": 0,
        "prompt_n": 3,
        "prompt_ms": 30.0,
        "predicted_n": 3,
        "predicted_ms": 4.0,
        "draft_n": 2,
        "draft_n_accepted": 1,
    },
}


class Handler(BaseHTTPRequestHandler):
    """Reports readiness immediately. Answers, exits or rejects requests depending on the file name."""

    def do_GET(self) -> None:
        self._send(200, {"status": "ok"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = Path(sys.argv[0]).name
        if name == "crashes":
            os._exit(3)
        elif name == "rejects":
            self._send(400, {"error": {"message": "the request exceeds the context size"}})
        else:
            timings = {**ANSWER["timings"], "prompt_n": len(request["prompt"])}  # type: ignore[dict-item]
            self._send(200, {**ANSWER, "timings": timings})

    def _send(self, status: int, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print no log lines."""


def main() -> None:
    if "--version" in sys.argv:
        print("version: 1 (stand-in)")  # noqa: T201
        return
    if sys.argv[-1].endswith("none.gguf") or "ngram-cache" in sys.argv:
        print("system_info: n_threads = 2 | CPU : AVX2 = 1 | OPENMP = 1 | \nloading")  # noqa: T201
        print("E error: failed to load the model\nexiting")  # noqa: T201
        sys.exit(1)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
