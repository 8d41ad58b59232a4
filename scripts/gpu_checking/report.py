"""Write the report as Markdown and JSON, and read it to rerun individual checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from scripts.gpu_checking.gpu import CheckError
from scripts.gpu_checking.steps import Result


def read_report(path: Path, machine: Mapping[str, str]) -> dict[str, Result]:
    """Return the results in a JSON report, keyed by step. Empty if there is no report.

    Raises:
        CheckError: The report is damaged, or it is from another machine, version or kind of run.
    """
    try:
        report = json.loads(path.read_text("utf-8"))
        results = {step["name"]: Result(**step) for step in report["steps"]}
        before = report["machine"]
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckError(f"{path} cannot be read: {error}; delete it, or choose another --results") from None
    if different := sorted(name for name in {**before, **machine} if before.get(name) != machine.get(name)):
        names = ", ".join(different)
        raise CheckError(f"{path} is from another run (different {names}); choose another --results folder")
    return results


def write_report(path: Path, machine: Mapping[str, str], results: Mapping[str, Result]) -> None:
    """Write the report to a Markdown file, and to a JSON file with the same name."""
    path.write_text(to_markdown(machine, results), "utf-8")
    report = {"machine": machine, "steps": [asdict(result) for result in results.values()]}
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def to_markdown(machine: Mapping[str, str], results: Mapping[str, Result]) -> str:
    """Return the report: the machine, a table of all steps, their figures, and the output of failed ones."""
    failed = [name for name, result in results.items() if result.status == "failed"]
    verdict = f"{len(failed)} of {len(results)} steps failed: {', '.join(failed)}." if failed else ""
    lines = [
        "# GPU check",
        "",
        verdict or f"All {len(results)} steps passed.",
        "",
        "| machine | |",
        "|---|---|",
    ]
    lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in machine.items()]
    lines += ["", "| step | status | seconds | problem |", "|---|---|---|---|"]
    lines += [
        f"| {result.name} | {result.status} | {result.seconds:g} | {_cell(result.problem)} |"
        for result in results.values()
    ]
    for result in results.values():
        if not (result.figures or result.output):
            continue
        lines += ["", f"## {result.name}"]
        if result.figures:
            lines += ["", "| | |", "|---|---|"]
            lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in result.figures.items()]
        if result.output:
            lines += ["", "Last lines of the output:", "", *(f"    {line}" for line in result.output)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
