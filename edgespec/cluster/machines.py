"""The machines that share a target's layers: how `--workers` lists them, and what workers report.

Layers are divided among the machines' devices in proportion to memory. Before a target uses a worker, the
worker sends its status, with the versions of the libraries that run the target's layers. They must be the
same on all of the target's machines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from edgespec.errors import OptionError
from edgespec.system.sizes import parse_size

__all__ = [
    "LAYERS",
    "LEAD",
    "LLAMA_CPP",
    "LOOPBACK",
    "MAX_STATUS_BYTES",
    "MEASURE",
    "MLX",
    "PROBE",
    "STDIN_SILENCE_SECONDS",
    "Device",
    "Library",
    "Machines",
    "SshAddress",
    "WorkerAddress",
    "WorkerStatus",
    "installed_mlx",
    "parse_address",
    "parse_machines",
    "split_layers",
]

LOOPBACK = "127.0.0.1"
_LOCAL = "local"
_SSH = "ssh://"
_HINT = "use a list such as 192.168.1.20:50052=16GiB,ssh://user@host=16GiB,local=8GiB"
# A host name or an IPv4 address. llama.cpp's RPC client does not support IPv6 addresses.
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
# Unlike llama.cpp's RPC client, `ssh` also supports IPv6 addresses, and host names from ~/.ssh/config.
_SSH_URL = re.compile(
    rf"{_SSH}([A-Za-z0-9_][A-Za-z0-9._-]*@)?({_HOST.pattern}|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{{1,5}}))?"
)
# llama.cpp splits a model across at most 16 devices.
_MAX_WORKERS = 15
_MAX_PORT = 65535
# The first line of a connection. `PROBE` requests only the worker's status. `LEAD` also reserves the worker:
# after the status, the worker sends a byte every second until either side closes the connection. After
# `MEASURE`, the worker sends its status and answers the messages of `measure_link`. `LAYERS` starts a process
# that runs an MLX target's layers, and the connection then carries the messages of `layer_block.py`. A
# reserved worker accepts `LAYERS` only once.
PROBE, LEAD = b"edgespec worker probe\n", b"edgespec worker lead\n"
MEASURE, LAYERS = b"edgespec worker measure\n", b"edgespec worker layers\n"
MAX_STATUS_BYTES = 65536
_MAX_BYTES = 1 << 63
# Once a worker has received data on stdin, it exits if stdin then stays silent for this many seconds. A
# connection can break silently, for example when a laptop goes to sleep.
STDIN_SILENCE_SECONDS = 60.0
LLAMA_CPP, MLX = "llama-cpp-python", "mlx-lm"


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """The address of a worker.

    Attributes:
        host: The host name or IPv4 address.
        port: The port.
        memory_bytes: The memory to use on the worker, or None for all that it offers.
        ssh_url: The machine's `ssh://` address if edgespec started the worker, or an empty string. If set,
            `host` and `port` are the local end of the tunnel.
    """

    host: str
    port: int
    memory_bytes: int | None = None
    ssh_url: str = ""

    def __str__(self) -> str:
        return self.ssh_url or f"{self.host}:{self.port}"

    @property
    def restart_advice(self) -> str:
        """Advice to show when the worker is lost."""
        if self.ssh_url:
            return "check that the worker's machine is running and reachable by SSH, then try again"
        return "restart `edgespec worker` there, then try again"


@dataclass(frozen=True, slots=True)
class SshAddress:
    """A machine on which edgespec starts a worker over SSH, such as `ssh://user@host:22`.

    If `memory_bytes` is None, edgespec uses all memory that the worker offers.
    """

    url: str
    memory_bytes: int | None = None

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines that hold the layers of a target, in the order of the layers.

    Attributes:
        workers: The workers.
        local_bytes: Memory for layers on this machine, which holds the first layers. 0 if it holds none.
    """

    workers: tuple[WorkerAddress | SshAddress, ...]
    local_bytes: int = 0


def parse_machines(name: str, text: str) -> Machines:
    """Parse a list such as `host:port=16GiB,ssh://user@host,local=8GiB`. Raises OptionError."""
    workers: list[WorkerAddress | SshAddress] = []
    local_bytes = 0
    for item in map(str.strip, text.split(",")):
        place, equals, size = item.partition("=")
        memory_bytes = parse_size(f"the memory for {place!r} in {name}", size) if equals else None
        if memory_bytes is not None and memory_bytes <= 0:
            raise OptionError(
                f"the memory for {place!r} in {name} must be greater than 0, not {size!r}", _HINT
            )
        if place.startswith(_SSH):
            workers.append(SshAddress(_check_ssh_url(name, place), memory_bytes))
        elif place != _LOCAL:
            host, port = parse_address(f"worker in {name}", place, _HINT)
            workers.append(WorkerAddress(host, port, memory_bytes))
        elif memory_bytes is None or local_bytes:
            raise OptionError(
                f"{name} can list `local` only once, and only with a memory size",
                "for example, write local=8GiB to use 8 GiB of this machine's memory",
            )
        else:
            local_bytes = memory_bytes
    if not workers:
        raise OptionError(f"{name} {text!r} does not list any workers", _HINT)
    if len(workers) > _MAX_WORKERS:
        raise OptionError(f"{name} lists {len(workers)} workers", f"list at most {_MAX_WORKERS} workers")
    names = [str(worker) for worker in workers]
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise OptionError(f"{name} lists {twice} more than once", "list each worker once")
    return Machines(tuple(workers), local_bytes)


def _check_ssh_url(name: str, text: str) -> str:
    match = _SSH_URL.fullmatch(text)
    if match is None:
        raise OptionError(
            f"an SSH address in {name} must have the form ssh://user@host:port, not {text!r}", _HINT
        )
    if match["port"] and not 0 < int(match["port"]) <= _MAX_PORT:
        raise OptionError(f"the port of {text!r} must be between 1 and {_MAX_PORT}", _HINT)
    return text


def parse_address(
    what: str, text: str, hint: str, *, accepts: Callable[[int], bool] = bool
) -> tuple[str, int]:
    """Parse `host:port`. Raises OptionError.

    Args:
        what: What the address is for, such as `worker`.
        text: The address.
        hint: Advice to show for an invalid address.
        accepts: Returns whether a port number is allowed. By default, 0 is not.
    """
    host, _, port = text.rpartition(":")
    if not _HOST.fullmatch(host) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise OptionError(f"the address of a {what} must have the form host:port, not {text!r}", hint)
    if int(port) > _MAX_PORT or not accepts(int(port)):
        raise OptionError(f"the port of {text!r} must be between 1 and {_MAX_PORT}", hint)
    return host, int(port)


def split_layers(layer_bytes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """Assign consecutive layers to devices. Return the layer count per device, or None if they do not fit.

    Args:
        layer_bytes: The memory that each layer needs.
        capacities: The memory available for layers on each device, in layer order. Can be 0 or negative.
    """
    rooms = [max(0, each) for each in capacities]
    if not sum(rooms):
        return None
    ends = [end / sum(rooms) * sum(layer_bytes) for end in accumulate(rooms)]
    # Divide the layers' bytes into one interval per device. Each device gets the layers whose midpoints fall
    # into its interval.
    middles = [end - size / 2 for end, size in zip(accumulate(layer_bytes), layer_bytes, strict=True)]
    places = [next((i for i, end in enumerate(ends) if middle < end), len(ends) - 1) for middle in middles]
    counts = [places.count(device) for device in range(len(rooms))]
    return counts if _fits(layer_bytes, counts, rooms) else _fill(layer_bytes, rooms)


def _fits(layer_bytes: Sequence[int], counts: Sequence[int], rooms: Sequence[int]) -> bool:
    first = 0
    for count, room in zip(counts, rooms, strict=True):
        if sum(layer_bytes[first : first + count]) > room:
            return False
        first += count
    return True


def _fill(layer_bytes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """Fill the devices in order. Return the layer count per device, or None if the layers do not fit."""
    counts, layer = [], 0
    for room in rooms:
        first, used = layer, 0
        while layer < len(layer_bytes) and used + layer_bytes[layer] <= room:
            used += layer_bytes[layer]
            layer += 1
        counts.append(layer - first)
    return counts if layer == len(layer_bytes) else None


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
