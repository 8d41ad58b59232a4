"""Each constant that affects a decision states where its value comes from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "edgespec"
MODULES = sorted(
    {*PACKAGE.rglob("constants.py")}.union(
        *((PACKAGE / name).rglob("*.py") for name in ("bench", "memory", "methods"))
    )
)
ORIGIN = re.compile(r"\b(chosen|measured|derived)\b", re.IGNORECASE)
NUMBERS = re.compile(r"[A-Z][A-Z_0-9]*|\(?[A-Z][A-Z_0-9]*(, [A-Z][A-Z_0-9]*)+\)?")
# They mark data, and affect no decision.
NO_DECISION = ("SEPARATOR = -1", "VERSION = 1")


def comments(module: Path) -> Iterator[tuple[str, str]]:
    """Yield a module's public numbers, each with its comment or that of the preceding assignments."""
    text = module.read_text(encoding="utf-8")
    lines = text.splitlines()
    comment, previous = "", 0
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign):
            continue
        assert node.end_lineno
        first = node.lineno - 1
        while lines[first - 1].startswith("#"):
            first -= 1
        if first < node.lineno - 1 or previous != node.lineno - 1:
            comment = " ".join(lines[first : node.lineno - 1])
        previous = node.end_lineno
        is_number = re.search(r"\d", ast.unparse(node.value)) and "'" not in ast.unparse(node.value)
        if is_number and NUMBERS.fullmatch(ast.unparse(node.targets[0])):
            yield ast.unparse(node), comment


def test_there_are_constants() -> None:
    assert sum(bool(list(comments(module))) for module in MODULES) > 20


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_each_constant_is_measured_or_chosen(module: Path) -> None:
    found = [assignment for assignment, comment in comments(module) if not ORIGIN.search(comment)]
    assert not [assignment for assignment in found if assignment not in NO_DECISION]
