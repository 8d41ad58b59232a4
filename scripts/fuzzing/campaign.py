"""Run the fuzz inputs of the subjects in alternation, and save the results so that a later run can resume."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from scripts.fuzzing.process import Limits, Outcome, WorkerProcess
from scripts.fuzzing.worker import Files, random_for, write_files

# Seconds between saves of the state.
_SAVE_SECONDS = 2.0
# Number of inputs that a worker runs per unit of weight before the next subject's turn. Large enough to make
# memory leaks visible.
_INPUTS_PER_TURN = 20
# Memory growth after the first fifth of a worker's turn that counts as a leak. Caches and heap fragmentation
# stay below this.
LEAK_BYTES = 32 << 20
_MINIMISE_SECONDS = 20.0
_GROWTH = "growth of memory"


@dataclass(frozen=True, slots=True)
class Subject:
    """A fuzz target: a module or class with the functions `make(rng) -> Files` and `run(folder)`.

    `place` is its name for `pkgutil.resolve_name`, and `weight` its relative number of inputs.
    """

    name: str
    place: str
    weight: int


@dataclass(slots=True)
class Results:
    """The results of one subject. `findings` counts the failed inputs by signature."""

    next_number: int = 0
    accepted: int = 0
    rejected: int = 0
    crash: int = 0
    hang: int = 0
    traceback: int = 0
    memory: int = 0
    growth_bytes: int = 0
    findings: dict[str, int] = field(default_factory=dict)


class Campaign:
    """All inputs generated from one seed. The folder has `state.json` and one folder per kind of failure.

    Args:
        folder: The results folder. If it contains a saved state, the campaign resumes from it.
        subjects: The subjects to run.
        seed: Seed for all inputs.
        limits: Limits for each input.
        report: Called with a one-line summary of each new finding.
    """

    def __init__(
        self,
        folder: Path,
        subjects: Sequence[Subject],
        seed: int,
        limits: Limits | None = None,
        report: Callable[[str], None] = print,
        minimise_seconds: float = _MINIMISE_SECONDS,
    ) -> None:
        self.folder, self.subjects, self.seed, self.report = folder, subjects, seed, report
        self._limits, self._minimise_seconds = limits or Limits(), minimise_seconds
        self._state = folder / "state.json"
        self._saved = 0.0
        self.results: dict[str, Results] = {each.name: Results() for each in subjects}
        if self._state.exists():
            stored = json.loads(self._state.read_text("utf-8"))
            self.results |= {name: Results(**values) for name, values in stored.items()}

    def recheck(self) -> None:
        """Rerun the findings of earlier runs, and drop those that are fixed."""
        for path in sorted(self.folder.glob("*/finding.json")):
            finding = json.loads(path.read_text("utf-8"))
            results = self.results[finding["subject"]["name"]]
            if finding["signature"] == _GROWTH or (outcome := replay(path.parent, self._limits)).is_finding:
                continue
            inputs = results.findings.pop(finding["signature"])
            setattr(results, finding["kind"], getattr(results, finding["kind"]) - inputs)
            setattr(results, outcome.kind, getattr(results, outcome.kind) + inputs)
            shutil.rmtree(path.parent)
            self._save()
            self.report(f"fixed: {finding['signature']}")

    def run(self, count: int, seconds: float) -> None:
        """Run inputs until `count` have been run across all subjects, or time runs out."""
        end = time.monotonic() + seconds
        weights = sum(subject.weight for subject in self.subjects)
        goals = {each.name: -(-count * each.weight // weights) for each in self.subjects}
        try:
            while time.monotonic() < end and any(self._missing(each, goals) for each in self.subjects):
                for subject in self.subjects:
                    if (missing := self._missing(subject, goals)) and time.monotonic() < end:
                        self._turn(subject, min(missing, subject.weight * _INPUTS_PER_TURN), end)
        finally:
            self._save()

    def _missing(self, subject: Subject, goals: Mapping[str, int]) -> int:
        return max(0, goals[subject.name] - self.results[subject.name].next_number)

    def _turn(self, subject: Subject, count: int, end: float) -> None:
        """Run the next inputs of one subject in one worker."""
        results = self.results[subject.name]
        resident: list[int] = []
        with closing(WorkerProcess(subject.place, subject.name, self._limits)) as worker:
            for _ in range(count):
                if time.monotonic() > end:
                    break
                number = results.next_number
                results.next_number += 1
                self._save(at_most_every=_SAVE_SECONDS)
                outcome = worker.ask(seed=self.seed, number=number)
                setattr(results, outcome.kind, getattr(results, outcome.kind) + 1)
                if outcome.is_finding:
                    self._record(subject, number, outcome)
                if outcome.resident_bytes:
                    resident.append(outcome.resident_bytes)
                else:
                    resident.clear()  # Samples from different workers are not comparable.
        grown = _growth(resident)
        results.growth_bytes = max(results.growth_bytes, grown)
        if grown > LEAK_BYTES:
            detail = f"The worker grew by {grown >> 20} MiB while it ran {len(resident)} inputs."
            self._record(subject, results.next_number - 1, Outcome("memory", _GROWTH, detail))
            results.memory += 1

    def _record(self, subject: Subject, number: int, outcome: Outcome) -> None:
        """Count a finding. Minimise the first input of each signature and write it to a folder."""
        findings = self.results[subject.name].findings
        findings[outcome.signature] = findings.get(outcome.signature, 0) + 1
        if findings[outcome.signature] > 1:
            return
        files = dict(resolve_name(subject.place).make(random_for(self.seed, subject.name, number)))
        if outcome.signature != _GROWTH:
            files = self._minimised(subject, files, outcome)
        folder = self.folder / f"{subject.name}-{number}"
        write_files(folder / "input", files)
        finding = {
            "subject": asdict(subject),
            "seed": self.seed,
            "number": number,
            "kind": outcome.kind,
            "signature": outcome.signature,
            "replay": f"scripts/fuzz --replay {folder}",
        }
        (folder / "finding.json").write_text(json.dumps(finding, indent=1) + "\n", "utf-8")
        (folder / "detail.txt").write_text(outcome.detail, "utf-8")
        self._save()
        self.report(f"{outcome.kind}: {outcome.signature}\n  scripts/fuzz --replay {folder}")

    def _minimised(self, subject: Subject, files: Files, outcome: Outcome) -> dict[str, bytes]:
        folder = self.folder / "minimising"
        with closing(WorkerProcess(subject.place, subject.name, self._limits)) as worker:

            def fails(candidate: Files) -> bool:
                write_files(folder, candidate)
                again = worker.ask(folder=str(folder.absolute()))
                return (again.kind, again.signature) == (outcome.kind, outcome.signature)

            smallest = minimise(files, fails, self._minimise_seconds) if fails(files) else dict(files)
        shutil.rmtree(folder, ignore_errors=True)
        return smallest

    def _save(self, at_most_every: float = 0.0) -> None:
        if time.monotonic() - self._saved < at_most_every:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self._state.with_suffix(".tmp")
        stored = {name: asdict(results) for name, results in self.results.items()}
        temporary.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
        temporary.replace(self._state)
        self._saved = time.monotonic()


def replay(folder: Path, limits: Limits | None = None) -> Outcome:
    """Rerun one finding's input and return the outcome."""
    subject = json.loads((folder / "finding.json").read_text("utf-8"))["subject"]
    with closing(WorkerProcess(subject["place"], subject["name"], limits or Limits())) as worker:
        return worker.ask(folder=str((folder / "input").absolute()))


def table(campaign: Campaign) -> str:
    """Return the results as a Markdown table, with totals in the last row."""
    header = ["subject", "inputs", "accepted", "rejected with a clear error"]
    header += ("crashes", "hangs", "tracebacks", "out of memory or leaking", "growth of memory, MiB")
    rows: list[list[Any]] = []
    for name, each in campaign.results.items():
        inputs = each.accepted + each.rejected + each.crash + each.hang + each.traceback
        found = [each.crash, each.hang, each.traceback, each.memory]
        rows.append([name, inputs, each.accepted, each.rejected, *found, round(each.growth_bytes / 2**20)])
    columns = list(zip(*rows, strict=True))[1:]
    rows.append(["all", *map(sum, columns[:-1]), max(columns[-1])])
    return "\n".join(_lines(header, rows))


def _lines(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(f'{each:,}' if isinstance(each, int) else each for each in row)} |"


def _growth(resident: Sequence[int]) -> int:
    """Return how much resident memory grew between the second and the last fifth of a worker's samples."""
    fifth = len(resident) // 5
    if fifth < 4:
        return 0
    return int(
        max(0.0, statistics.median(resident[-fifth:]) - statistics.median(resident[fifth : 2 * fifth]))
    )


def minimise(files: Files, fails: Callable[[Files], bool], seconds: float) -> dict[str, bytes]:
    """Remove files, then parts of files, as long as the input still fails.

    This is delta debugging (Zeller and Hildebrandt, 2002).

    Args:
        files: The failing input.
        fails: Returns whether an input still fails in the same way.
        seconds: Time limit of the search.
    """
    end = time.monotonic() + seconds
    smallest = dict(files)
    for name in files:
        rest = {other: content for other, content in smallest.items() if other != name}
        if rest and time.monotonic() < end and fails(rest):
            smallest = rest
    for name in sorted(smallest, key=lambda each: -len(smallest[each])):
        parts = 2
        while time.monotonic() < end and parts <= 2 * len(smallest[name]):
            content = smallest[name]
            size = -(-len(content) // parts)
            for start in range(0, len(content), size):
                shorter = smallest | {name: content[:start] + content[start + size :]}
                if time.monotonic() < end and fails(shorter):
                    smallest, parts = shorter, max(2, parts - 1)
                    break
            else:
                parts *= 2
    return smallest
