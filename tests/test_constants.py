"""Each constant that affects a decision states where its value comes from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "edgespec"
MODULES = sorted(PACKAGE.rglob("constants.py"))
ORIGIN = re.compile(r"\b(chosen|measured|derived)\b", re.IGNORECASE)


def comments(module: Path) -> Iterator[tuple[str, str]]:
    """Yield a module's assignments, each with its comment or that of the preceding assignments."""
    text = module.read_text(encoding="utf-8")
    lines = text.splitlines()
    comment, previous = "", 0
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign) or ast.unparse(node).startswith("__all__"):
            continue
        assert node.end_lineno
        first = node.lineno - 1
        while lines[first - 1].startswith("#"):
            first -= 1
        if first < node.lineno - 1 or previous != node.lineno - 1:
            comment = " ".join(lines[first : node.lineno - 1])
        previous = node.end_lineno
        yield ast.unparse(node), comment


def test_there_is_a_module_per_subsystem() -> None:
    assert len(MODULES) > 5


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.parent.name)
def test_each_constant_is_measured_or_chosen(module: Path) -> None:
    assert not [assignment for assignment, comment in comments(module) if not ORIGIN.search(comment)]
