"""Check the workers given with `--workers`, for `edgespec doctor` and `edgespec models list`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgespec.cli.interrupt import Stop
from edgespec.cluster.connected import LinkSpeed, measure_link, probe_worker, usable_bytes, wait_for
from edgespec.cluster.machines import (
    LLAMA_CPP,
    Library,
    SshAddress,
    WorkerAddress,
    WorkerStatus,
    parse_machines,
)
from edgespec.cluster.ssh import reach_workers
from edgespec.errors import CancelledError, EdgespecError
from edgespec.system.files import format_bytes, format_number, format_rate

__all__ = ["CheckedWorker", "check_workers"]

# Held during each measurement, because concurrent measurements would compete for this machine's network.
_measuring = threading.Lock()


@dataclass(frozen=True, slots=True)
class CheckedWorker:
    """The results of checking a worker.

    Attributes:
        address: The worker's address.
        status: What the worker reports about itself. None if it is unreachable.
        link: The speed of the connection. None if it could not be measured.
        error: Why a model cannot use the worker now. None if it can.
    """

    address: WorkerAddress | SshAddress
    status: WorkerStatus | None = None
    link: LinkSpeed | None = None
    error: EdgespecError | None = None

    @property
    def finding(self) -> str:
        """The worker's status as text, preceded by the error, if any."""
        facts = []
        if self.status is not None:
            devices = (
                f"{each.name} with {format_bytes(each.free_bytes)} free" for each in self.status.devices
            )
            facts = [
                f"edgespec {self.status.edgespec}, llama-cpp-python {self.status.llama_cpp},"
                + (f" mlx-lm {self.status.mlx_lm}" if self.status.mlx_lm else " no mlx-lm"),
                f"offers {format_bytes(self.status.memory_bytes)} ({', '.join(devices)})",
            ]
        if self.link is not None:
            speed = f"{format_rate(self.link.bytes_per_second / 1e6)} MB/s"
            facts.append(f"round trip {format_number(self.link.round_trip_seconds * 1e3, 2)} ms, {speed}")
        return "; ".join(filter(None, (self.error.what if self.error else "", *facts)))

    def memory_for(self, library: Library) -> int:
        """Return the memory in bytes that a target may use on this worker, or 0 if the worker cannot run it.

        `library` identifies the library that runs the target and its version on this machine.
        """
        if self.status is None:
            return 0
        try:
            return usable_bytes(self.address, self.status, library)
        except EdgespecError:
            return 0

    def to_json(self) -> dict[str, Any]:
        """Return the findings as JSON-compatible values."""
        return {
            "address": str(self.address),
            "reachable": self.status is not None,
            **(self.status.to_json() if self.status else {}),
            "round_trip_seconds": self.link and self.link.round_trip_seconds,
            "bytes_per_second": self.link and self.link.bytes_per_second,
            "error": self.error and str(self.error),
        }


def check_workers(text: str, llama_cpp: str, stop: Stop) -> list[CheckedWorker]:
    """Check the workers in a list such as `host:port=16GiB,host:port`, without reserving them.

    Workers reached by SSH are started for the check and stopped afterwards. All workers are checked in
    parallel.

    Args:
        text: The value of `--workers`.
        llama_cpp: The version of llama-cpp-python on this machine.
        stop: Cancels the check.

    Returns:
        The results, in the order of the list.

    Raises:
        OptionError: The list is invalid.
        CancelledError: A stop was requested.
    """
    workers = parse_machines("--workers", text).workers
    library = Library(LLAMA_CPP, llama_cpp)
    with ThreadPoolExecutor(len(workers), "edgespec-check") as pool:
        return list(pool.map(lambda machine: _check(machine, library, stop), workers))


def _check(machine: WorkerAddress | SshAddress, library: Library, stop: Stop) -> CheckedWorker:
    status = link = None

    def progress(*_: object) -> bool:
        return not stop.requested

    try:
        with reach_workers((machine,), progress) as (address,):
            status = wait_for(partial(probe_worker, address), f"connecting to {machine}", progress)
            with _measuring:
                link = wait_for(partial(measure_link, address), f"measuring {machine}", progress)
            usable_bytes(address, status, library)
    except CancelledError:
        raise
    except EdgespecError as error:
        return CheckedWorker(machine, status, link, error)
    return CheckedWorker(machine, status, link)
