"""The maps of the house: what they name is there, and every room is on them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NAME = re.compile(r"[a-z_]+(?:\.py|/)")


def mapped(page: str) -> dict[Path, str]:
    """Every file and folder a page's tree names, with the words on it."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = lines.index("    edgespec/")
    found: dict[Path, str] = {}
    folders: dict[int, Path] = {2: ROOT}
    for line in lines[start:]:
        if not line.startswith("    "):
            break
        depth = len(line) - len(line.lstrip())
        folder = folders[depth - 2]
        names = _NAME.findall(re.split(r"\s{3,}", line.strip())[0])
        assert names, line
        folders[depth] = folder / names[0]
        # What the words name beside it lies in the same folder.
        also = _NAME.findall(re.split(r"\s{3,}", line.strip(), maxsplit=1)[-1])
        found |= {folder / name: line for name in (*names, *(name for name in also if name.endswith(".py")))}
    return found


def test_what_the_maps_name_is_there() -> None:
    for page in ("CONTRIBUTING.md", "README.md"):
        missing = [f"{page}: {path}" for path in mapped(page) if not path.exists()]
        assert not missing


def test_every_room_is_on_the_map() -> None:
    package = ROOT / "edgespec"
    rooms = {
        path
        for path in package.iterdir()
        if not path.name.startswith("__") and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert rooms <= set(mapped("CONTRIBUTING.md"))


def test_every_way_of_guessing_is_on_the_map() -> None:
    drafters = ROOT / "edgespec" / "drafters"
    names = {path.name.removesuffix(".py") for path in drafters.iterdir() if not path.name.startswith("__")}
    named = {path.name.removesuffix(".py") for path in mapped("CONTRIBUTING.md") if path.parent == drafters}
    assert named == names - {"cost", "text"}
