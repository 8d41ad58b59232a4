"""The map in docs/architecture.md lists every module with the first line of its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import DOCS, ROOT, check_block

PACKAGE = ROOT / "edgespec"


def summary(module: Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    assert docstring, f"{module} has no docstring"
    return docstring.splitlines()[0]


def rows(folder: Path, indent: str = "    ") -> Iterator[str]:
    """Yield one line per module and package, packages after modules."""
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    packages = sorted(path.parent for path in folder.glob("*/__init__.py"))
    for module in modules:
        yield f"{indent}{module.name:28}{summary(module)}"
    for package in packages:
        yield f"{indent}{package.name + '/':28}{summary(package / '__init__.py')}"
        yield from rows(package, indent + "    ")


def test_the_map_lists_every_module() -> None:
    check_block("architecture.md", "map", "\n".join(["", "    edgespec/", *rows(PACKAGE, " " * 8), "", ""]))


@pytest.mark.parametrize(
    "page", [DOCS / "architecture.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name
)
def test_files_named_in_the_documentation_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").partition("<!-- map -->")[0]
    names = re.findall(r"`([a-z_/]+\.(?:py|toml)|[a-z_/]+/)`", text)
    assert names
    for name in names:
        places = (ROOT / name, *PACKAGE.rglob(name), *(ROOT / "tests").rglob(name))
        assert any(place.exists() for place in places), name
