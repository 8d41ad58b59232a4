"""The backend registry: what it looks up, and that no other package compares format names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.backends.built_in import BUILT_IN
from edgespec.model.registry import (
    backend_of,
    backends,
    format_at,
    format_of,
    is_registered,
    register,
    same_backend,
)

PACKAGE = Path(edgespec.__file__).parent
FORMATS = {form.name for backend in backends() for form in backend.formats}


def _compared_formats(path: Path) -> list[str]:
    """Return a file's comparisons in which a format name is an operand, or an item of one."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        operands: list[ast.expr] = []
        if not isinstance(node, ast.Compare | ast.MatchValue | ast.Subscript):
            continue
        if isinstance(node, ast.Compare):
            equal = all(isinstance(operator, ast.Eq | ast.NotEq) for operator in node.ops)
            # `"layerskip" in methods` asks about a method of that name.
            operands = [node.left, *node.comparators] if equal else node.comparators
        else:
            operands = [node.value]
        for operand in operands:
            items = operand.keys if isinstance(operand, ast.Dict) else getattr(operand, "elts", [operand])
            if any(isinstance(item, ast.Constant) and item.value in FORMATS for item in items):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_format_is_compared_outside_the_backends() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "backends" not in path.parents]
    assert len(files) > 100
    assert [line for path in files for line in _compared_formats(path)] == []


def test_a_comparison_would_be_found(tmp_path: Path) -> None:
    code = 'a == "mlx"\nb in ("gguf", "mlx")\n{"gguf": 1, "mlx": 2}[c]\n"layerskip" in methods\n'
    path = PACKAGE / "never_written.py"
    source = tmp_path / path.name
    source.write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.backends.test_registry.PACKAGE", tmp_path)
        assert len(_compared_formats(source)) == 3


def test_lookup_by_format() -> None:
    assert backend_of("gguf") is backend_of("layerskip")
    assert same_backend("gguf", "layerskip")
    assert not same_backend("gguf", "mlx")
    assert format_of("mlx").check_adapters
    assert not is_registered("lowbit")
    with pytest.raises(KeyError):
        format_of("nothing")


def test_a_file_counts_as_gguf_and_a_folder_as_mlx(tmp_path: Path) -> None:
    assert format_at(tmp_path / "model").name == "gguf"
    assert format_at(tmp_path).name == "mlx"


def test_a_taken_format_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'gguf' is already registered"):
        register(backends()[0])


def _lazy_names() -> Iterator[str]:
    for backend in BUILT_IN:
        formats = backend.formats
        supports = [support for form in formats for support in form.networks.values()]
        models = [form.benchmark_models for form in formats if form.benchmark_models]
        records: tuple[Any, ...] = (backend, *formats, *supports, *models)
        for record in records:
            values = (getattr(record, field.name) for field in fields(record))
            yield from (value.args[0] for value in values if isinstance(value, partial))


@pytest.mark.parametrize("name", _lazy_names())
def test_a_function_that_is_imported_on_first_use_exists(name: str) -> None:
    module, _, function = name.partition(":")
    if module.startswith("mlx."):
        pytest.importorskip("mlx_lm")
    assert callable(getattr(import_module(f"edgespec.backends.{module}"), function))
