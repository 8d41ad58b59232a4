"""Parse web origins and patterns as users write them, and recognise this machine's names and addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address

from edgespec.errors import OptionError

__all__ = ["ANY_ORIGIN", "is_loopback", "is_origin", "origins_regex"]

ANY_ORIGIN = "*"
"""The pattern that allows every web page and app."""


_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[^/?#@:\[\]\s]*)(?::(?P<port>[0-9]{1,5}|\*))?/?",
    re.IGNORECASE,
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_HOST = re.compile(r"[a-z0-9_.-]*|\[[0-9a-f:.]+\]")
_ANY_PORT = r"(?::[0-9]+)?"


def origins_regex(origins: Iterable[str]) -> str:
    """Return a regular expression matching the allowed origins as browsers send them.

    - Case, a trailing slash and the default port are ignored.
    - `*.example.com` matches any subdomain, `:*` any port, and `chrome-extension://*` any extension.
    - A name for this machine without a port, such as `http://localhost`, allows every port.

    Args:
        origins: The origins as users write them. Each string can contain several, separated by commas.

    Raises:
        OptionError: An item in `origins` is not an origin.
    """
    each = [part for origin in origins for part in origin.split(",")]
    return f"(?i:{'|'.join(map(_regex, each))})"


def is_origin(text: str) -> bool:
    """Return whether `origins_regex` accepts a string as an origin."""
    try:
        return bool(_regex(text))
    except OptionError:
        return False


def _regex(origin: str) -> str:
    text = origin.strip()
    if text == ANY_ORIGIN:
        return ".*"
    if text.lower() == "null":
        return "null"  # Browsers send this for files and other pages without an origin.
    match = _ORIGIN.fullmatch(text)
    if match is None:
        raise OptionError(f"--allow-origin {text[:100]!r} is not an origin", _advice(text))
    scheme, port = match["scheme"].lower(), match["port"] or ""
    host, anything = _ascii_host(match["host"].lower()), ""
    if host == ANY_ORIGIN:
        host, anything = "", "[^/:]+"
    elif host.startswith("*."):
        host, anything = host[1:], "[^/:]+"
    if not _HOST.fullmatch(host):
        raise OptionError(
            f"--allow-origin {text[:100]!r} has an invalid host",
            "write a host such as chat.example.com, or *.example.com for all its subdomains",
        )
    if port == _DEFAULT_PORTS.get(scheme):
        port = ""
    elif port == "*" or (not port and scheme in _DEFAULT_PORTS and is_loopback(host.strip("[]"))):
        return f"{re.escape(scheme)}://{anything}{re.escape(host)}{_ANY_PORT}"
    return re.escape(scheme) + f"://{anything}" + re.escape(host) + (f":{port}" if port else "")


def _ascii_host(host: str) -> str:
    """Return a host name as browsers send it, such as `xn--bcher-kva.example`."""
    try:
        return ".".join(
            label if label.isascii() else label.encode("idna").decode() for label in host.split(".")
        )
    except UnicodeError:
        return host


def _advice(text: str) -> str:
    match = _ORIGIN.match(text)
    if match and match["host"] and text[len(match[0].rstrip("/"))] in "/?#":
        return f"an origin has no path; write {match[0].rstrip('/')}"
    if re.fullmatch(r"[\w.*-]+(:[0-9*]+)?/?", text):
        return f"write {'http' if is_loopback(text.partition(':')[0]) else 'https'}://{text.rstrip('/')}"
    return "write an origin such as https://chat.example.com, http://localhost:3000 or chrome-extension://*"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can be reached only from this machine."""
    # Host names are case-insensitive. A trailing dot marks a fully qualified name.
    if host.removesuffix(".").lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
