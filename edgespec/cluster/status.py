"""The status line that a worker sends before a target uses the worker.

It contains the versions of the libraries that run a target's layers, which must be the same on all of the
target's machines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "LAYERS",
    "LEAD",
    "LLAMA_CPP",
    "MAX_STATUS_BYTES",
    "MEASURE",
    "MLX",
    "PROBE",
    "STDIN_SILENCE_SECONDS",
    "Device",
    "Library",
    "WorkerStatus",
    "installed_mlx",
]

# The first line of a connection. `PROBE` requests only the worker's status. `LEAD` also reserves the worker:
# after the status, the worker sends a byte every second until either side closes the connection. After
# `MEASURE`, the worker sends its status and answers the messages of `link.py`. `LAYERS` starts a process that
# runs an MLX target's layers, and the connection then carries the messages of `layer_block.py`. A reserved
# worker accepts `LAYERS` only once.
PROBE, LEAD = b"edgespec worker probe\n", b"edgespec worker lead\n"
MEASURE, LAYERS = b"edgespec worker measure\n", b"edgespec worker layers\n"
MAX_STATUS_BYTES = 65536
_MAX_BYTES = 1 << 63
# Once a worker has received data on stdin, it exits if stdin then stays silent for this many seconds. A
# connection can break silently, for example when a laptop goes to sleep.
STDIN_SILENCE_SECONDS = 60.0
LLAMA_CPP, MLX = "llama-cpp-python", "mlx-lm"


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a worker, such as `CPU` or `CUDA0`, with its free memory in bytes."""

    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The information that a worker reports about itself.

    Attributes:
        edgespec: The version of edgespec.
        llama_cpp: The version of llama-cpp-python, which must be the same on all machines of a GGUF target.
        protocol: The version of llama.cpp's RPC protocol.
        devices: The devices that the worker offers.
        memory_bytes: The total memory that the worker offers, across all devices.
        busy: Whether another target uses the worker.
        speed: The measured speed of the machine, as written by `edgespec.loading.workers`. Empty if
            it was not measured.
        mlx_lm: The versions of mlx-lm and mlx, which must be the same on all machines of an MLX target. Empty
            if they are not installed.
    """

    edgespec: str
    llama_cpp: str
    protocol: str
    devices: tuple[Device, ...]
    memory_bytes: int
    busy: bool = False
    speed: Mapping[str, Any] = field(default_factory=dict)
    mlx_lm: str = ""

    def version_of(self, library: str) -> str:
        """Return the version of `LLAMA_CPP` or `MLX`, or an empty string if it is not installed."""
        return {LLAMA_CPP: self.llama_cpp, MLX: self.mlx_lm}[library]

    def to_json(self) -> dict[str, Any]:
        """Return the status as a JSON object."""
        return {
            "edgespec": self.edgespec,
            "llama_cpp": self.llama_cpp,
            "mlx_lm": self.mlx_lm,
            "protocol": self.protocol,
            "devices": [asdict(device) for device in self.devices],
            "memory_bytes": self.memory_bytes,
            "busy": self.busy,
        }

    def to_line(self) -> bytes:
        """Return the status as a line to send."""
        return json.dumps({**self.to_json(), "speed": dict(self.speed)}).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> WorkerStatus:
        """Parse a status line. Raises ValueError if it is invalid, as when another program answers."""
        try:
            given = json.loads(line)
            devices = tuple(Device(str(each["name"]), int(each["free_bytes"])) for each in given["devices"])
            status = cls(
                edgespec=_short(given["edgespec"]),
                llama_cpp=_short(given["llama_cpp"]),
                protocol=_short(given["protocol"]),
                devices=devices,
                memory_bytes=int(given["memory_bytes"]),
                busy=given["busy"] is True,
                speed=dict(given["speed"]),
                mlx_lm=_short(given["mlx_lm"]),
            )
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError("the response is not a valid worker status") from error
        sizes = (status.memory_bytes, *(device.free_bytes for device in devices))
        if not devices or not all(0 <= size < _MAX_BYTES for size in sizes):
            raise ValueError("the response is not a valid worker status")
        return status


def _short(text: object) -> str:
    return str(text)[:100]


@dataclass(frozen=True, slots=True)
class Library:
    """A library's package name, `LLAMA_CPP` or `MLX`, and its version."""

    name: str
    version: str


def installed_mlx() -> str:
    """Return the versions of mlx-lm and mlx, or an empty string if they are not installed."""
    # Importing this module takes 20 ms, and `edgespec --help` does not need it.
    from importlib import metadata

    try:
        return f"{metadata.version('mlx-lm')} (mlx {metadata.version('mlx')})"
    except metadata.PackageNotFoundError:
        return ""
