"""The server's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgespec.errors import OptionError
from edgespec.options.default_model import default_model
from edgespec.server.security import is_loopback, origins_regex

__all__ = ["ServerSettings"]

DEFAULT_PORT = 11435  # Next to Ollama's port 11434, so that both can run.
# Default idle time in seconds after which a model is unloaded, as in Ollama.
DEFAULT_IDLE_UNLOAD_SECONDS = 300.0
DEFAULT_MAX_WAITING = 16


@dataclass(frozen=True)
class ServerSettings:
    """The server's settings: what it serves, and to whom.

    Attributes:
        target: The model for requests that name no model, or whose model name cannot refer to any model.
            If None, the default model serves requests that name no model.
        draft: The draft model for `target`. Other models use the best one on this machine.
        load_options: Options of `edgespec.load`. Options for a single model apply only to `target`.
        reply_options: Default reply options.
        host: Address to listen on.
        port: Port to listen on, or 0 to choose a free one.
        api_key: Key that clients must send. Required unless `host` is a loopback address.
        allowed_origins: Origins of the web pages that may use the server, in the syntax of `origins_regex`.
        idle_unload_seconds: Time after which an unused model is unloaded. If 0, models stay loaded.
        max_waiting: Maximum number of requests waiting for each model.

    Raises:
        OptionError: The server would be reachable from other machines without a key, or an origin is invalid.
    """

    target: str | None = None
    draft: str | None = "auto"
    load_options: Mapping[str, Any] = field(default_factory=dict)
    reply_options: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    idle_unload_seconds: float = DEFAULT_IDLE_UNLOAD_SECONDS
    max_waiting: int = DEFAULT_MAX_WAITING

    @property
    def model(self) -> str:
        """The reference to the server's own model."""
        return self.target or default_model()

    def __post_init__(self) -> None:
        origins_regex(self.allowed_origins)
        if self.api_key is not None and not self.api_key.strip():
            raise OptionError(
                "the API key is empty",
                "set --api-key or EDGESPEC_API_KEY to a long random string",
                code="api_key_missing",
            )
        if not is_loopback(self.host) and self.api_key is None:
            raise OptionError(
                f"--host {self.host} makes the server reachable from other machines, but there is no API key",
                "set EDGESPEC_API_KEY or --api-key to a long random string",
                code="api_key_missing",
            )
