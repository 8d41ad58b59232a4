"""A fake Hugging Face server on 127.0.0.1 that simulates network faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

REPOSITORY = "someone/tiny-GGUF"
COMMIT = "c" * 40


def _etag(data: bytes) -> str:
    """Return the ETag of a file: its SHA-256 if it is large, else its git hash."""
    if len(data) > 1000:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _listed(name: str, data: bytes) -> dict[str, Any]:
    """Return a file's entry in the list of a repository's files. Large files are stored with Git LFS."""
    entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _etag(data)}
    if len(data) > 1000:
        entry |= {"blobId": "0" * 40, "lfs": {"size": len(data), "sha256": _etag(data), "pointerSize": 130}}
    return entry


@dataclass
class StandInHub:
    """The server's files and simulated faults. `requests` lists the requested paths."""

    files: dict[str, bytes] = field(default_factory=dict)
    status: int = 200
    error_code: str = ""
    token: str = ""
    cut_after_bytes: list[int] = field(default_factory=list)
    """Byte counts after which each of the next downloads loses its connection."""
    stall_after_bytes: list[int] = field(default_factory=list)
    """Byte counts after which each of the next downloads stalls until the server stops."""
    damaged: bool = False
    takes_ranges: bool = True
    elsewhere: str = ""
    """Another host that downloads are redirected to, as on Hugging Face."""
    found: list[dict[str, Any]] = field(default_factory=list)
    """The hub's metadata for the repositories that a search can find."""
    gone: set[str] = field(default_factory=set)
    """Files that are listed but cannot be downloaded."""
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    tokens: dict[str, set[str]] = field(default_factory=dict)
    """The Authorization header of the requests, by host name."""
    stopped: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    _server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.stopped.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.requests.append(f"{self.command} {path}")
        host = self.headers.get("Host", "").partition(":")[0]
        hub.tokens.setdefault(host, set()).add(self.headers.get("Authorization", ""))
        if hub.elsewhere and path.startswith("/cdn/"):
            self._file(hub.files[path.removeprefix("/cdn/")], body=body)
            return
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, "GatedRepo")
        elif hub.status != 200:
            self._refuse(hub.status, hub.error_code)
        elif path == "/api/models":
            (wanted,) = parse_qs(urlsplit(self.path).query)["search"]
            found = [each for each in hub.found if wanted.lower() in each["id"].lower()]
            self._send(json.dumps(found).encode(), {})
        elif path == f"/api/models/{REPOSITORY}":
            siblings = [_listed(name, data) for name, data in hub.files.items()]
            self._send(json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode(), {})
        elif file := re.match(f"/{REPOSITORY}/resolve/(?:main|{COMMIT})/(.+)", path):
            if file.group(1) in hub.gone:
                self._refuse(404, "EntryNotFound")
            elif hub.elsewhere:
                self._send_on(file.group(1))
            else:
                self._file(hub.files[file.group(1)], body=body)
        else:
            self._refuse(404, "RepoNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()

    def _send(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _send_on(self, name: str) -> None:
        data = self.hub.files[name]
        headers = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-ETag": f'"{_etag(data)}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"{self.hub.elsewhere}/cdn/{name}",
        }
        self._send(b"", headers, status=302)

    def _file(self, data: bytes, *, body: bool) -> None:
        hub = self.hub
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{_etag(data)}"',
            "Content-Length": str(len(data)),
        }
        if not body:
            self._send(b"", headers)
            return
        start = 0
        asked = self.headers.get("Range")
        if asked:
            hub.ranges.append(asked)
        if asked and hub.takes_ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        sent = data[start:]
        headers["Content-Length"] = str(len(sent))
        if hub.damaged:
            sent = bytes(len(sent))
        if hub.cut_after_bytes:
            sent = sent[: hub.cut_after_bytes.pop(0)]
            self.close_connection = True
        if hub.stall_after_bytes:
            sent = sent[: hub.stall_after_bytes.pop(0)]
            self._send(sent, headers, status=206 if start else 200)
            self.wfile.flush()
            hub.stopped.wait(20)
            self.close_connection = True
            return
        self._send(sent, headers, status=206 if start else 200)
