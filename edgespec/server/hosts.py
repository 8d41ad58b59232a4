"""Recognise the host names and addresses of this machine."""

from __future__ import annotations

from ipaddress import ip_address

__all__ = ["is_loopback"]


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can be reached only from this machine."""
    # Host names are case-insensitive. A trailing dot marks a fully qualified name.
    if host.removesuffix(".").lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
