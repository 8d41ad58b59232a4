"""The settings of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from edgespec.errors import OptionError

__all__ = ["ServerSettings", "is_loopback"]

DEFAULT_PORT = 11435  # Next to Ollama's port 11434, so that both can run.
# Default number of seconds without requests after which a model is unloaded, as in Ollama.
DEFAULT_IDLE_UNLOAD_SECONDS = 300.0
DEFAULT_MAX_WAITING = 16


@dataclass(frozen=True)
class ServerSettings:
    """What to serve, and to whom.

    Attributes:
        target: The model for requests that name none.
        draft: Its draft model. Other models use the best one on this machine.
        load_options: Options of `edgespec.load`. Options for a single model apply to `target` only.
        reply_options: Options of replies whose requests do not set them.
        host: Address to listen on.
        port: Port to listen on. 0 chooses a free one.
        api_key: Key that clients must send. Required unless `host` is a loopback address.
        allowed_origins: Origins of the web pages that may use the server.
        idle_unload_seconds: Unload a model that was not used for this long. 0 never unloads it.
        max_waiting: Maximum number of requests that wait for each model.

    Raises:
        OptionError: The server would be reachable from other machines without a key.
    """

    target: str = "demo"
    draft: str | None = "auto"
    load_options: Mapping[str, Any] = field(default_factory=dict)
    reply_options: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    idle_unload_seconds: float = DEFAULT_IDLE_UNLOAD_SECONDS
    max_waiting: int = DEFAULT_MAX_WAITING

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise OptionError(
                "the API key is empty", "set --api-key or EDGESPEC_API_KEY to a long random text"
            )
        if not is_loopback(self.host) and self.api_key is None:
            raise OptionError(
                f"--host {self.host} makes the server reachable from other machines, but there is no API key",
                "set EDGESPEC_API_KEY or --api-key to a long random text",
            )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
