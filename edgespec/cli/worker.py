"""`edgespec worker`: let a model on another machine use this machine's memory and processors."""

from __future__ import annotations

import ipaddress
import os
import select
import stat
import sys
import threading
from collections.abc import Callable
from typing import Any

import click

from edgespec.cli.failures import DONE, error_json
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import KindType
from edgespec.cli.screen import note, print_json
from edgespec.cluster.machines import STDIN_SILENCE_SECONDS, parse_address
from edgespec.errors import EdgespecError, OptionError
from edgespec.options.option import Integer, Size
from edgespec.system.files import cache_folder, format_bytes
from edgespec.system.sizes import parse_size

__all__ = ["command"]

_DEFAULT_ADDRESS = "127.0.0.1:50052"


@click.command(
    "worker",
    cls=HelpfulCommand,
    short_help="Let edgespec on another machine use this one.",
    examples=(
        "edgespec worker",
        "edgespec worker --memory 8GiB --cache 50GiB",
        "edgespec worker --listen 192.168.1.20:50052 --i-trust-this-network",
    ),
)
@click.option(
    "--listen", default=_DEFAULT_ADDRESS, metavar="HOST:PORT", show_default=True,
    help="Address to listen on. Port 0 chooses a free port. Addresses that other machines can reach need"
    " --i-trust-this-network.",
)  # fmt: skip
@click.option(
    "--memory", type=KindType(Size()), metavar="SIZE",
    help="Memory to lend, such as 8GiB. [default: the free memory minus 512 MiB]",
)  # fmt: skip
@click.option(
    "--cache", type=KindType(Size()), metavar="SIZE",
    help="Cache up to SIZE of the models' weights on disk, so that they need not be sent again next time."
         " [default: keep none]",
)  # fmt: skip
@click.option(
    "--threads", type=KindType(Integer(1, 1024)), metavar="N",
    help="Number of CPU threads to use. [default: the number of usable cores]",
)  # fmt: skip
@click.option(
    "--i-trust-this-network", "trusts_network", is_flag=True,
    help="Allow an address that other machines can reach. There is no password and no encryption: anyone on"
         " the network can use this machine's memory and read your chats.",
)  # fmt: skip
def command(trusts_network: bool, **options: Any) -> int:
    """Let a model that runs on another machine use the memory and processors of this one.

    The easiest way is to run nothing here: on the other machine, add `--workers ssh://THIS-MACHINE`, which
    connects over SSH and starts the worker.

    Otherwise, start the worker here, and pass its address to --workers on the other machine. Without
    --i-trust-this-network, only programs on this machine can connect to it. A worker runs one model at a
    time, and needs the same version of llama-cpp-python as the other machine. When it is ready, it prints its
    address, versions, devices and memory as a line of JSON. If it cannot start, it prints the error as JSON.

    Press Ctrl-C to stop the worker. If its input is a pipe, as with `ssh HOST edgespec worker`, it also stops
    when the pipe is closed.
    """
    hint = f"use --listen {_DEFAULT_ADDRESS}"
    host, port = parse_address("listener", options["listen"], hint, accepts=_any_port)
    if not (trusts_network or _is_loopback(host)):
        raise OptionError(
            f"--listen {options['listen']} is open to other machines, but workers have no password"
            " protection",
            "use --workers ssh://HOST on the other machine, or add --i-trust-this-network",
        )
    interruptible(lambda stop: _serve(stop, host, port, options))
    return DONE


def _any_port(_port: int) -> bool:
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(stop: Stop, host: str, port: int, options: dict[str, Any]) -> None:
    from edgespec import __version__
    from edgespec.cluster.weight_cache import WeightCache
    from edgespec.cluster.worker_server import WorkerServer
    from edgespec.loading.workers import saved_speed_json

    memory, cache = options["memory"], options["cache"]
    memory_bytes = None if memory is None else parse_size("--memory", memory)
    try:
        server = WorkerServer(
            __version__,
            host,
            port,
            memory_bytes=memory_bytes,
            cache=None
            if cache is None
            else WeightCache(cache_folder() / "workers", parse_size("--cache", cache)),
            threads=options["threads"],
            speed=saved_speed_json(),
            note=note,
        )
    except EdgespecError as error:
        # An edgespec that started this worker over SSH reads the error's code.
        print_json(error_json(error))
        raise
    stop.on_request(server.close)
    _close_with_stdin(server.close)
    status = server.status()
    if memory_bytes is not None and memory_bytes > status.memory_bytes:
        note(
            f"--memory {format_bytes(memory_bytes)} is more than this machine has free, so the worker offers"
            f" {format_bytes(status.memory_bytes)}; close other programs to offer more"
        )
    print_json({"address": f"{server.host}:{server.port}", "port": server.port, **status.to_json()})
    server.serve()


def _close_with_stdin(close: Callable[[], None]) -> None:
    """Call `close` when stdin is closed, if it is a pipe from the program that started the worker.

    Once data has arrived, `close` is also called if nothing arrives for `STDIN_SILENCE_SECONDS`.
    """
    if sys.stdin is None:
        return
    number = sys.stdin.fileno()
    mode = os.fstat(number).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return

    def wait() -> None:
        timeout_seconds: float | None = None
        while select.select([number], (), (), timeout_seconds)[0] and os.read(number, 4096):
            timeout_seconds = STDIN_SILENCE_SECONDS
        close()

    threading.Thread(target=wait, daemon=True).start()
