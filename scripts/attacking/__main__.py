"""Attack `edgespec serve` and check that it does not crash, hang, leak memory or mix up its clients' texts.

    scripts/attack                                          # 10,000 requests to the demo model
    scripts/attack --requests 2000 -- --target demo-mlx     # options after -- are options of the server
    scripts/attack --requests 2000 --neighbours -- --parallel 4 --draft demo-draft --prefix-cache none

Many hostile clients send damaged, mutated, slow, incomplete and oversized requests to every endpoint, flood
the server, disconnect at random times, and load and unload models. Each prompt contains a unique word, which
must not appear in the reply to another client. At the same time, an honest client asks the same questions
repeatedly and must get the same replies. With `--neighbours`, further clients use schemas, tools,
log-probabilities and drafting methods that change with each request. Each of their replies is compared with
the reply to the same request alone.

Prints the server's memory, open files and threads after each round of hostile clients. The exit status is 1
if the server crashes, hangs or fails because of a bug, if a reply is wrong, or if its memory use or its
number of files or threads grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edgespec.cli.running import counted
from scripts.attacking.honest import HonestClient
from scripts.attacking.neighbours import Neighbours
from scripts.attacking.senders import ATTACKS, Connection, new_canary, problem
from scripts.attacking.victim import Usage, Victim, started

_ROOT = Path(__file__).resolve().parents[2]
# Number of requests between two measurements of the server's resources, and number of concurrent hostile
# clients.
_ROUND, _CLIENTS = 500, 60
# Seconds to wait before a measurement, so that the server can finish what the hostile clients started.
_QUIET_SECONDS = 3.0
# Maximum growth after the first third of the attack. Memory may grow a little, because allocators do not
# return all of it.
_MAX_GROWTH = Usage(48 * 2**20, 10, 10)


@dataclass
class Record:
    """The results of an attack, which can be run in several parts.

    Attributes:
        requests: Number of hostile requests.
        honest: Number of replies to the honest client.
        expected: The replies that the honest client expects.
        outcomes: Number of requests by attack and HTTP status.
        problems: Descriptions of the server's failures.
        usage: The server's resource use before the attack and after each round, without the prefix caches.
    """

    requests: int = 0
    honest: int = 0
    expected: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path | None) -> Record:
        """Return the results of earlier parts, or an empty record."""
        if path is None or not path.exists():
            return cls()
        values = json.loads(path.read_text())
        return cls(**{**values, "usage": [Usage(*each) for each in values["usage"]]})

    @property
    def growth(self) -> Usage:
        """How much more the server uses in the last third of the attack than in the second.

        Compares the minimum of each third. The number of open files shows how many models are loaded, so the
        memory is compared only between measurements with the usual number.
        """
        third = len(self.usage) // 3
        if not third:
            return Usage(0, 0, 0)
        usual, _ = Counter(each.files for each in self.usage).most_common(1)[0]

        def least(part: Sequence[Usage]) -> Usage:
            alike = [each for each in part if each.files == usual] or part
            lowest = Usage(*map(min, zip(*part, strict=True)))
            return lowest._replace(memory_bytes=min(each.memory_bytes for each in alike))

        middle, end = least(self.usage[third : 2 * third]), least(self.usage[-third:])
        return Usage(*(last - earlier for earlier, last in zip(middle, end, strict=True)))

    def failures(self) -> list[str]:
        """Return the reasons why the server failed."""
        return self.problems + [
            f"{name} grew by {grown:,}"
            for name, grown, limit in zip(Usage._fields, self.growth, _MAX_GROWTH, strict=True)
            if grown > limit
        ]


async def _attack(victim: Victim, record: Record, requests: int, seed: int, with_neighbours: bool) -> None:
    draw, outcomes = random.Random(f"{seed} {record.requests}"), Counter(record.outcomes)
    honest = HonestClient(victim.port, record.expected)
    await honest.prepare()
    record.expected = honest.expected
    record.usage = record.usage or [victim.usage()]
    stop = asyncio.Event()
    asking = asyncio.create_task(honest.run(stop))
    neighbours = Neighbours(victim.port, draw) if with_neighbours else None
    sharing = asyncio.create_task(neighbours.run(stop)) if neighbours else None
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            with suppress(Exception):
                peak = max(peak, victim.usage().memory_bytes)
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    places = asyncio.Semaphore(_CLIENTS)
    target = record.requests + requests
    while record.requests < target and victim.is_running():
        count = min(_ROUND, target - record.requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await places.acquire()
                task = group.create_task(
                    _request(victim.port, random.Random(draw.random()), record, outcomes)
                )
                task.add_done_callback(lambda _: places.release())
        record.requests += count
        await asyncio.sleep(_QUIET_SECONDS)
        if not victim.is_running():
            break
        usage, cache_bytes = victim.usage(), victim.prefix_cache_bytes()
        # Prefix caches grow up to a limit, and are empty after a model has been reloaded.
        record.usage.append(usage._replace(memory_bytes=usage.memory_bytes - cache_bytes))
        print(
            f"{record.requests:6} requests  {usage.memory_bytes / 2**20:5.0f} MiB (peak {peak / 2**20:.0f},"
            f" prefix cache {cache_bytes / 2**20:.0f})"
            f"  {usage.files} files  {usage.threads} threads  {record.honest + honest.count} honest replies"
            f"  {len(record.problems) + len(honest.problems)} problems",
            flush=True,
        )
    if not victim.is_running():
        record.problems.append("the server crashed")
    stop.set()
    await asking
    if neighbours and sharing:
        await sharing
        count, near_ties, problems = await neighbours.compare()
        ties = counted(len(near_ties), "near-tie")
        print(f"{count} replies to neighbours compared with replies alone: {ties}")
        for each in near_ties:
            print(f"near-tie: {each}")
        record.problems += problems
    watching.cancel()
    record.honest += honest.count
    record.problems += honest.problems
    record.outcomes = dict(outcomes)


async def _request(port: int, draw: random.Random, record: Record, outcomes: Counter[str]) -> None:
    attack = draw.choices(list(ATTACKS), list(ATTACKS.values()))[0]
    client = Connection(port, draw, new_canary(draw))
    with client:
        try:
            await attack(client)
            status = client.received[9:12].decode("latin-1") or "no reply"
        except OSError as error:
            # TimeoutError is a subclass of OSError.
            status = type(error).__name__
            if isinstance(error, TimeoutError):
                record.problems.append(f"{attack.__name__}: no end of the reply: {client.received[-300:]!r}")
    if found := problem(client.received, client.canary):
        record.problems.append(f"{attack.__name__}: {found}")
    outcomes[f"{attack.__name__} {status}"] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attack and print the results. Return 1 if the server failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=10_000, help="number of hostile requests (default: 10,000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="each seed gives different requests (default: 0)")
    parser.add_argument(
        "--neighbours", action="store_true", help="compare further replies with replies alone"
    )
    parser.add_argument("--pid", type=int, help="attack this running server instead of starting one")
    parser.add_argument("--record", type=Path, help="continue the attack that this file records")
    parser.add_argument("--log", type=Path, default=_ROOT / "build" / "attack.log", help="the server's log")
    parser.add_argument("server_options", nargs="*", help="options of edgespec serve")
    args = parser.parse_args(arguments)
    record = Record.load(args.record)
    args.log.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        victim = Victim(args.pid) if args.pid else stack.enter_context(started(args.server_options, args.log))
        asyncio.run(_attack(victim, record, args.requests, args.seed, args.neighbours))
    if args.record:
        args.record.write_text(json.dumps(asdict(record)))
    return _report(record)


def _report(record: Record) -> int:
    for outcome, count in sorted(record.outcomes.items()):
        print(f"{count:6}  {outcome}")
    print(f"{record.requests:,} hostile requests, {record.honest:,} equal honest replies")
    growth = record.growth
    print(
        f"growth after the first third: {growth.memory_bytes / 2**20:+.1f} MiB, {growth.files:+} files,"
        f" {growth.threads:+} threads"
    )
    failures = record.failures()
    for failure in failures[:20]:
        print(f"FAILED: {failure[:1500]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
