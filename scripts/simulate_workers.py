#!/usr/bin/env python3
"""Estimate the speed-up of large targets on several machines for docs/workers-simulation.md.

    scripts/simulate_workers.py            # prints the tables
    scripts/simulate_workers.py --write    # into docs/workers-simulation.md

The page lists all assumptions. Nothing is measured or random.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.methods.costs.curve import CostCurve
from scripts.simulation.machines import MACHINES

PAGE = Path(__file__).parent.parent / "docs" / "workers-simulation.md"
BEGIN, END = "<!-- simulated -->\n", "<!-- simulated, end -->\n"
# Fraction of the published memory bandwidth that a pass reaches, and of the memory that a model can use.
USABLE_BANDWIDTH, USABLE_MEMORY = 0.7, 0.75
# Time that llama.cpp's RPC adds to a pass for each worker, in addition to the round trip. Measured with the
# demo model on one worker over the loopback interface, whose round trip is below 0.1 ms.
OVERHEAD_SECONDS = 0.5e-3
ACCEPTANCE_RATE = 0.7
MAX_DRAFT_LENGTH = 8
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Network:
    """A network with its round trip, and its bandwidth in bytes per second."""

    name: str
    round_trip_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with the memory for models and its bandwidth, in GB and GB/s.

    `curve` is the cost of wider passes, in units of a single-token pass.
    """

    name: str
    memory_gb: float
    bandwidth_gb: float
    curve: CostCurve

    @property
    def capacity_bytes(self) -> float:
        return self.memory_gb * GIGA * USABLE_MEMORY

    @property
    def bytes_per_second(self) -> float:
        return self.bandwidth_gb * GIGA * USABLE_BANDWIDTH


@dataclass(frozen=True, slots=True)
class Target:
    """A target and its draft model, with 4-bit weights.

    Attributes:
        size_gb: Size of the weights.
        read_gb: Weights that a single-token pass reads, which are fewer in a mixture of experts.
        hidden: Size of the hidden state that each link carries for each token.
        draft_gb: Size of the draft model, which runs on the first machine.
    """

    name: str
    size_gb: float
    read_gb: float
    hidden: int
    draft_gb: float


NETWORKS = (
    Network("1 GbE", 0.3e-3, 0.117 * GIGA),
    Network("10 GbE", 0.15e-3, 1.17 * GIGA),
    Network("Wi-Fi 6", 5e-3, 0.06 * GIGA),
    Network("Thunderbolt", 0.3e-3, 2.0 * GIGA),
)
_CURVES = {machine.name: machine.curve for machine in MACHINES}
KINDS = (
    Machine("Mac mini M4 Pro, 48 GB", 48, 273, _CURVES["M4 Pro"]),
    Machine("Mac Studio M3 Ultra, 256 GB", 256, 819, _CURVES["M3 Ultra"]),
    Machine("PC with RTX 4090, 24 GB", 24, 1008, _CURVES["A100"]),
    Machine("PC without graphics card, 64 GB", 64, 90, _CURVES["2 CPU cores, Q4_K_M"]),
)
TARGETS = (
    Target("8B", 4.9, 4.9, 4096, 0.8),
    Target("32B", 19.9, 19.9, 5120, 0.8),
    Target("70B", 42.5, 42.5, 8192, 0.8),
    Target("235B (22B active)", 142, 13.4, 4096, 0.8),
    Target("405B", 243, 243, 16384, 4.9),
)
COUNTS = (1, 2, 4, 8)


def machines_needed(machine: Machine, target: Target) -> int:
    """Return how many machines of a kind hold a target."""
    return math.ceil(target.size_gb * GIGA / machine.capacity_bytes)


def speeds(machine: Machine, target: Target, count: int, network: Network) -> tuple[float, float]:
    """Return the tokens per second with plain decoding and with the best fixed draft length.

    Args:
        machine: The kind of all machines. The first one is the user's own.
        target: The target.
        count: Number of machines.
        network: The network between the first machine and the others.
    """
    compute = target.read_gb * GIGA / machine.bytes_per_second
    draft = target.draft_gb * GIGA / machine.bytes_per_second
    links = count - 1

    def round_seconds(draft_length: int) -> float:
        width = draft_length + 1
        # The hidden states travel to the worker and back, as 32-bit numbers.
        transfer = 2 * width * target.hidden * 4 / network.bytes_per_second
        hops = links * (network.round_trip_seconds + OVERHEAD_SECONDS + transfer)
        return draft_length * draft + compute * machine.curve.v(width) + hops

    def drafted(draft_length: int) -> float:
        tokens = (1 - ACCEPTANCE_RATE ** (draft_length + 1)) / (1 - ACCEPTANCE_RATE)
        return tokens / round_seconds(draft_length)

    return drafted(0), max(drafted(length) for length in range(MAX_DRAFT_LENGTH + 1))


def send_seconds(target: Target, count: int, network: Network) -> float:
    """Return the time to send the weights of all machines except the first."""
    return target.size_gb * GIGA * (count - 1) / count / network.bytes_per_second


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _rows(machine: Machine) -> Iterator[tuple[str, ...]]:
    for target in TARGETS:
        needed = machines_needed(machine, target)
        if needed > COUNTS[-1]:
            yield target.name, f"does not fit on {COUNTS[-1]}", *[""] * len(NETWORKS)
            continue
        # The fewest machines, and every larger number in the list.
        for count in sorted({needed, *(each for each in COUNTS if each > needed)}):
            results = [speeds(machine, target, count, network) for network in NETWORKS]
            yield target.name, str(count), *(f"{_number(plain)} / {_number(best)}" for plain, best in results)


def tables() -> str:
    """Return the tables of the page in Markdown."""
    parts = []
    for machine in KINDS:
        head = ("target", "machines", *(network.name for network in NETWORKS))
        parts.append(_table(f"{machine.name}, {machine.bandwidth_gb:g} GB/s", head, list(_rows(machine))))
    loads = [
        (target.name, *(f"{send_seconds(target, 2, network) / 60:.1f} min" for network in NETWORKS))
        for target in TARGETS
    ]
    heading = "Time to send half of the weights to a second machine"
    parts.append(_table(heading, ("target", *(network.name for network in NETWORKS)), loads))
    return "\n".join(parts)


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *rows)]
    return f"\n**{title}**\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables or write them into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    if not parser.parse_args().write:
        print(tables())
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        parser.error(f"{PAGE} has no {BEGIN.strip()} and {END.strip()}")
    PAGE.write_text(f"{before}{BEGIN}{tables()}{END}{after}", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
