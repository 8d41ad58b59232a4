"""Every method on tiny models with every kind of memory, compared with plain decoding.

docs/compatibility.md contains the resulting tables. Every `yes` is backed by replies that were generated and
compared, rather than by what a model claims to support. A feature that a model does not claim is a `no` with
the model's own reason. A wrong token is a failure. Each test run tests one model of each kind with a few
replies, and variants of a method only on models with full attention. The long tests cover everything, and
`WRITE_DOCS=1 pytest -m long tests/test_parity.py` rewrites the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from edgespec.options.methods import method_names
from tests.docs import DOCS, check_block
from tests.parity.capabilities import OF_BACKENDS, OF_MODELS
from tests.parity.methods import ROWS, Cell, Row, loaded_for, models_of, prove
from tests.parity.models import BACKENDS, COLUMNS, KINDS, Column, Tiny, Zoo
from tests.parity.tables import Proved, in_markdown


@pytest.fixture(scope="module", params=["first", pytest.param("all", marks=pytest.mark.long)])
def proved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proved]:
    """Run each proof once: with the first model of each kind and a few replies, or with everything."""
    zoo = Zoo(tmp_path_factory.mktemp("zoo"))

    def chosen(row: Row, column: Column) -> list[Tiny]:
        return models_of(zoo, row, column)[: 1 if request.param == "first" else None]

    @cache
    def group(tiny: Tiny, column: Column, loaded: Row, seldom: bool) -> dict[Row, Cell]:
        together = [row for row in ROWS if loaded_for(tiny, row) == loaded]
        rows = [row for row in together if tiny in chosen(row, column)]
        if request.param == "first":
            rows = [row for row in rows if is_seldom(row, column) == seldom]
        return prove(tiny, rows, briefly=request.param == "first")

    def cells(row: Row, column: Column) -> dict[str, Cell]:
        seldom = request.param == "first" and is_seldom(row, column)
        return {
            tiny.name: group(tiny, column, loaded_for(tiny, row), seldom)[row] for tiny in chosen(row, column)
        }

    @cache
    def of_models(what: str, column: Column) -> str:
        models = zoo.of(column)[: 1 if request.param == "first" else None]
        reasons = {OF_MODELS[what](tiny.target) for tiny in models}
        assert len(reasons) == 1, f"{KINDS[column]} differ: {reasons}"
        return reasons.pop()

    @cache
    def of_backend(what: str, backend: str) -> str:
        return OF_BACKENDS[what](zoo, backend)

    yield Proved(cells, of_models, of_backend)
    zoo.close()


def is_seldom(row: Row, column: Column) -> bool:
    """Return whether only the long tests prove a row."""
    return row.seldom or not (row.every or column.memory == "full")


def cannot(row: Row, column: Column, name: str) -> bool:
    """Where a method is known to be impossible."""
    if column.memory == "chunked":
        return row.method != "none"
    if row.network in ("residual", "dflash"):
        return column.memory == "recurrent" and bool(row.branches)
    if row.network == "mtp":
        if column.memory == "recurrent":
            return bool(row.branches)
        return column.backend == "MLX"
    if row.head and column.backend == "MLX":
        return row.drafters[0] != "eagle" or (column.memory == "recurrent" and bool(row.branches))
    if row.head and column.memory == "recurrent":
        return name != "lfm2"  # llama.cpp does not copy the input of the first layer of the others
    if row.head:
        return column != ("llama.cpp", "full")
    if column.memory == "recurrent":
        return bool(row.branches or row.itself or row.learn)
    if column.backend == "llama.cpp":
        return row.learn or ("layerskip" in row.itself and name == "gemma2")
    return False


def test_every_drafter_has_its_row() -> None:
    assert {name for row in ROWS for name in row.drafters} == set(method_names())


@pytest.mark.parametrize(
    ("row", "column"),
    [
        pytest.param(
            row,
            column,
            id=f"{row.title.replace('`', '')}-{' '.join(column)}",
            marks=pytest.mark.long if is_seldom(row, column) else (),
        )
        for row in ROWS
        for column in COLUMNS
    ],
)
def test_a_method_says_what_plain_decoding_says(proved: Proved, row: Row, column: Column) -> None:
    for name, cell in proved.cells(row, column).items():
        assert bool(cell.missing) == cannot(row, column, name), f"{name}: {cell.missing}"


@pytest.mark.parametrize("column", COLUMNS, ids=" ".join)
@pytest.mark.parametrize("what", OF_MODELS)
def test_a_model_does_what_it_says(proved: Proved, what: str, column: Column) -> None:
    reason = proved.of_models(what, column)
    assert not reason or column.memory in ("recurrent", "chunked")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", OF_BACKENDS)
def test_a_backend_does_what_it_says(proved: Proved, what: str, backend: str) -> None:
    assert not proved.of_backend(what, backend)


def test_the_documented_tables_have_all_rows() -> None:
    tables = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    for title in (*(row.title for row in ROWS), *OF_MODELS, *OF_BACKENDS):
        assert f"| {title} |" in tables


@pytest.mark.long
@pytest.mark.parametrize("proved", ["all"], indirect=True)
def test_the_documented_tables_match_the_results(proved: Proved) -> None:
    check_block("compatibility.md", "parity", in_markdown(proved))
