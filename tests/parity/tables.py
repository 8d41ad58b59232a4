"""The tables of README.md, in Markdown, from what was proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.parity.capabilities import OF_BACKENDS, OF_MODELS
from tests.parity.methods import ROWS, Cell, Row
from tests.parity.models import BACKENDS, COLUMNS, IN_HALVES, KINDS, Column

__all__ = ["Proved", "in_markdown"]

_LEGEND = """\
A column is a backend and how the model remembers: *full* attention, a sliding *window*, a *recurrent* state
(hybrids too), *chunked* attention. **yes**: at temperature 0, and sampled with a seed, the reply is plain
decoding's token for token, and of what was drafted some was accepted and some was not; with
`--acceptance rejection` it is so at temperature 0, and above that it runs (`tests/engine` enumerates its
law). **in trees**: some passes held several guesses for one position. Wide passes count as free here, so
that nothing is left out because it would not pay.
"""
_NUMBERS = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫"


@dataclass(frozen=True)
class Proved:
    """Asks for proofs. Each says why something does not work; nothing where it was proved to.

    cells: for each model that stands for the kind.
    """

    cells: Callable[[Row, Column], Mapping[str, Cell]]
    of_models: Callable[[str, Column], str]
    of_backend: Callable[[str, str], str]


class _Notes:
    """Footnotes, numbered as they come up."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def number(self, text: str) -> str:
        if text not in self._texts:
            self._texts.append(text)
        return _NUMBERS[self._texts.index(text)]

    def lines(self) -> str:
        return " \\\n".join(f"{self.number(text)} {text}" for text in self._texts) + "\n"


def in_markdown(proved: Proved) -> str:
    """Both tables with their legend, their footnotes, and the models they were proved on."""
    notes = _Notes()
    tables = [_methods(proved, notes), _LEGEND, _capabilities(proved, notes)]
    return "\n".join([*tables, "Why not, as edgespec itself says:\n", notes.lines(), _models()])


def _methods(proved: Proved, notes: _Notes) -> str:
    titles = [f"{c.backend}: {c.memory}" if c.memory == "full" else c.memory for c in COLUMNS]
    rows = [[row.title, *(_answers(proved.cells(row, column), notes) for column in COLUMNS)] for row in ROWS]
    return _table(["method", *titles], rows)


def _capabilities(proved: Proved, notes: _Notes) -> str:
    rows = [[what, *(_kinds(proved, backend, what, notes) for backend in BACKENDS)] for what in OF_MODELS]
    for what in OF_BACKENDS:
        reasons = [proved.of_backend(what, backend) for backend in BACKENDS]
        rows.append([what, *(_answer(reason, notes) for reason in reasons)])
    return _table(["what", *BACKENDS], rows)


def _answers(cells: Mapping[str, Cell], notes: _Notes) -> str:
    """One answer where all models of the kind agree."""
    answers = {name: _answer(cell.missing, notes, branched=cell.branched) for name, cell in cells.items()}
    if len(set(answers.values())) == 1:
        return next(iter(answers.values()))
    return "; ".join(f"{name} {answer}" for name, answer in answers.items())


def _answer(missing: str, notes: _Notes, *, branched: bool = False) -> str:
    if missing:
        return f"no{notes.number(missing)}"
    return "yes, in trees" if branched else "yes"


def _kinds(proved: Proved, backend: str, what: str, notes: _Notes) -> str:
    """Which kinds of memory can, and which cannot."""
    reasons = {c.memory: proved.of_models(what, c) for c in COLUMNS if c.backend == backend}
    can = ", ".join(memory for memory, reason in reasons.items() if not reason)
    cannot = ", ".join(f"{memory}{notes.number(reason)}" for memory, reason in reasons.items() if reason)
    return f"{can}; not {cannot}" if cannot else can


def _models() -> str:
    """The architectures that stand for the kinds."""
    lines = []
    for backend in BACKENDS:
        columns = [column for column in COLUMNS if column.backend == backend]
        names = [name for column in columns for name in (*KINDS[column], *IN_HALVES.get(column, ()))]
        lines.append(f"{backend}: {', '.join(names)}")
    every = "; ".join(row.title for row in ROWS if row.every)
    which = f"On all of these: {every};\nthe other rows on the first of each kind.\n"
    return "Proved on tiny models. " + ";\n".join(lines) + ".\n" + which


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
