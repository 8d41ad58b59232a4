"""The public names are complete and intentional, and import nothing heavy until used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import edgespec
from edgespec import errors

PACKAGE = Path(edgespec.__file__).parent
HEAVY = ("llama_cpp", "mlx", "textual")


def test_every_public_name_is_there_and_shown() -> None:
    for name in edgespec.__all__:
        assert getattr(edgespec, name) is not None
    assert dir(edgespec) == sorted(edgespec.__all__)
    assert len(set(edgespec.__all__)) == len(edgespec.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        edgespec.laod  # noqa: B018


def _modules() -> list[str]:
    paths = (path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py") if "mlx" not in path.parts)
    names = (".".join(path.with_suffix("").parts) for path in paths if path.name != "__main__.py")
    return sorted(name.removesuffix(".__init__") for name in names)


def test_every_name_in_all_exists() -> None:
    for name in _modules():
        module = importlib.import_module(name)
        offered = getattr(module, "__all__", [])
        assert len(set(offered)) == len(offered), name
        assert all(hasattr(module, public) for public in offered), name


def test_lazy_names_match_the_typed_imports() -> None:
    """Type checkers read the imports and Python the table, so both must agree on each name's module."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("edgespec")
        for alias in node.names
    }
    lazy = {name: getattr(edgespec, name).__module__ for name in edgespec.__all__ if name != "__version__"}
    assert typed == lazy
    assert typed == {name: module for module, names in edgespec._HOMES.items() for name in names}


def test_every_error_is_one_line_with_a_next_step() -> None:
    kinds = [kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)]
    assert errors.EdgespecError in kinds
    for kind in kinds:
        assert issubclass(kind, errors.EdgespecError)
        error = kind("it\nfailed  badly", "try\nagain")
        assert str(error) == "it failed badly; try again"
        assert (error.what, error.next_step) == ("it failed badly", "try again")
        assert str(kind("it failed")) == "it failed"


@pytest.mark.parametrize(
    "code",
    [
        "import edgespec",
        "import edgespec; edgespec.load, edgespec.Runtime, edgespec.Chat, edgespec.SamplingParams",
        "import edgespec.losslessness.verify",
        "import edgespec.engine.loop, edgespec.methods.model.drafter, edgespec.loading.bit_exactness",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(code: str) -> None:
    check = f"{code}; import sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], check=True, capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.stdout.strip() == "[]"


def test_the_first_screen_of_the_chat_needs_neither_numpy_nor_a_backend() -> None:
    unwanted = ("numpy", "llama_cpp", "mlx", "mcp", "edgespec.backends", "edgespec.api.runtime")
    code = "import edgespec.cli.chat, edgespec.tui.app, edgespec.tui.plain_run"
    check = f"{code}; import sys; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], check=True, capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.stdout.strip() == "[]"
