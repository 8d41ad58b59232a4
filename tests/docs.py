"""Generated blocks in the documentation, compared with the code or rewritten with WRITE_DOCS=1."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def check_block(page: str, name: str, expected: str) -> None:
    """Compare the block between `<!-- name -->` and `<!-- /name -->` of a page with the expected text."""
    path, begin, end = DOCS / page, f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found_begin, rest = path.read_text(encoding="utf-8").partition(begin)
    shown, found_end, after = rest.partition(end)
    assert found_begin, f"docs/{page} has no {begin}"
    assert found_end, f"docs/{page} has no {end}"
    if os.environ.get("WRITE_DOCS"):
        path.write_text(f"{before}{begin}{expected}{end}{after}", encoding="utf-8", newline="\n")
        return
    diff = difflib.unified_diff(shown.splitlines(), expected.splitlines(), page, "generated", lineterm="")
    assert shown == expected, "\n".join(["run the tests with WRITE_DOCS=1 to update docs/", *diff])
