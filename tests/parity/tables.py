"""Markdown tables for docs/compatibility.md, built from the results of the parity tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.parity.capabilities import OF_BACKENDS, OF_MODELS
from tests.parity.methods import ROWS, Cell, Row
from tests.parity.models import BACKENDS, COLUMNS, IN_HALVES, KINDS, WITH_MTP, Column

__all__ = ["Proved", "in_markdown"]

_LEGEND = """\
A column is a backend and a kind of model memory: *full* attention, sliding-*window* attention, a *recurrent*
state (also in hybrids) or *chunked* attention. **yes** means that at temperature 0, and when sampling with a
seed, the reply equals plain decoding token for token, and that some draft tokens were accepted and some
rejected. With `--acceptance rejection` this holds at temperature 0, and `tests/engine` checks the
distribution above that. **in trees** means that some passes verified several candidates for one position.
The tests treat wide passes as free, so that every method drafts.
"""


@dataclass(frozen=True)
class Proved:
    """Functions that run a proof and return the reason why something does not work, or an empty string.

    Attributes:
        cells: Results of a method in a column, by model.
        of_models: Result of a capability in a column.
        of_backend: Result of a capability of a backend.
    """

    cells: Callable[[Row, Column], Mapping[str, Cell]]
    of_models: Callable[[str, Column], str]
    of_backend: Callable[[str, str], str]


class _Notes:
    """Footnotes, numbered in order of first use."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def number(self, text: str) -> str:
        if text not in self._texts:
            self._texts.append(text)
        return chr(ord("①") + self._texts.index(text))  # Unicode has circled numbers up to 20.

    def lines(self) -> str:
        return " \\\n".join(f"{self.number(text)} {text}" for text in self._texts) + "\n"


def in_markdown(proved: Proved) -> str:
    """Return both tables with legend, footnotes and the list of test models."""
    notes = _Notes()
    tables = [_methods(proved, notes), _LEGEND, _capabilities(proved, notes)]
    return "\n".join([*tables, "Reasons, as edgespec reports them:\n", notes.lines(), _models()])


def _methods(proved: Proved, notes: _Notes) -> str:
    titles = [f"{c.backend}: {c.memory}" if c.memory == "full" else c.memory for c in COLUMNS]
    rows = [[row.title, *(_answers(proved.cells(row, column), notes) for column in COLUMNS)] for row in ROWS]
    return _table(["method", *titles], rows)


def _capabilities(proved: Proved, notes: _Notes) -> str:
    rows = [[what, *(_kinds(proved, backend, what, notes) for backend in BACKENDS)] for what in OF_MODELS]
    for what in OF_BACKENDS:
        reasons = [proved.of_backend(what, backend) for backend in BACKENDS]
        rows.append([what, *(_answer(reason, notes) for reason in reasons)])
    return _table(["capability", *BACKENDS], rows)


def _answers(cells: Mapping[str, Cell], notes: _Notes) -> str:
    """Return a single answer if all models of the kind agree, else one per model."""
    answers = {name: _answer(cell.missing, notes, branched=cell.branched) for name, cell in cells.items()}
    if len(set(answers.values())) == 1:
        return next(iter(answers.values()))
    return "; ".join(f"{name} {answer}" for name, answer in answers.items())


def _answer(missing: str, notes: _Notes, *, branched: bool = False) -> str:
    if missing:
        return f"no{notes.number(missing)}"
    return "yes, in trees" if branched else "yes"


def _kinds(proved: Proved, backend: str, what: str, notes: _Notes) -> str:
    """List the kinds of memory that support a capability, and those that do not."""
    reasons = {c.memory: proved.of_models(what, c) for c in COLUMNS if c.backend == backend}
    can = ", ".join(memory for memory, reason in reasons.items() if not reason)
    cannot = ", ".join(f"{memory}{notes.number(reason)}" for memory, reason in reasons.items() if reason)
    return f"{can}; not {cannot}" if cannot else can


def _models() -> str:
    """List the architectures of the test models."""
    lines = []
    for backend in BACKENDS:
        columns = [column for column in COLUMNS if column.backend == backend]
        names = [name for column in columns for name in (*KINDS[column], *IN_HALVES.get(column, ()))]
        with_mtp = [name for column in columns for name in WITH_MTP.get(column, ())]
        more = f", and for `mtp` {', '.join(with_mtp)}" if with_mtp else ""
        lines.append(f"{backend}: {', '.join(names)}{more}")
    every = "; ".join(row.title for row in ROWS if row.every)
    which = f"Tested on all of these: {every}.\nThe other rows are tested on the first model of each kind.\n"
    return "Tiny test models. " + ";\n".join(lines) + ".\n" + which


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
