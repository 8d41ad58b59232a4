"""`tests/messages.txt` contains every error message, and `docs/errors.md` every code.

After changing a message, run `WRITE_DOCS=1 pytest tests/test_messages.py`, and review the change in the file.
Other tests assert the class and code of an error, so that a message can be reworded without changing them.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from edgespec import errors
from edgespec.errors import EdgespecError
from tests.docs import ROOT, check_block

_GOLDEN = Path(__file__).with_name("messages.txt")
_CLASSES: Mapping[str, type[EdgespecError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, EdgespecError)
}
# The server's own error class, and the function that creates most of its errors.
_SERVER = {"ApiError", "invalid_request"}
# Shorter texts are names and units.
_SENTENCE_WORDS = 3


def _called(node: ast.AST) -> str:
    """Return the name of the function or class that a node calls, without its module or object."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _template(node: ast.expr) -> str:
    """The text of an expression, with `{name}` for each value."""
    match node:
        case ast.Constant(str(value)):
            return value
        case ast.JoinedStr(parts):
            return "".join(map(_template, parts))
        case ast.FormattedValue(value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left, ast.Add(), right):
            return _template(left) + _template(right)
        case ast.IfExp(_, then, otherwise):
            return f"({_template(then)} | {_template(otherwise)})"
        case _:
            return f"{{{ast.unparse(node)}}}"


class _Module:
    """The errors of one module, in source order, and its other texts."""

    def __init__(self, path: Path) -> None:
        self._tree = ast.parse(path.read_text("utf-8"))
        # The default code and the public class, by class name. A module can define subclasses.
        self._codes = {name: (kind.code, name) for name, kind in _CLASSES.items()}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef) and node.bases and ast.unparse(node.bases[0]) in self._codes:
                code, public = self._codes[ast.unparse(node.bases[0])]
                for each in node.body:
                    if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "code":
                        code = _template(each.value)
                self._codes[node.name] = code, public
        kinds = {*self._codes, *_SERVER}
        calls = (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))
        self._calls = sorted(
            (call for call in calls if _called(call) in kinds),
            key=lambda each: (each.lineno, each.col_offset),
        )

    def errors(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield the class, code and texts of each error."""
        for call in self._calls:
            name = _called(call)
            given = [each.value for each in call.keywords if each.arg == "code"]
            if name == "ApiError":
                given += call.args[3:4]
            default = self._codes[name][0] if name in self._codes else "invalid_request"
            texts = call.args[1:] if name == "ApiError" else call.args
            code = _template(given[0]) if given else default
            yield name, code, [" ".join(_template(each).split()) for each in texts]

    def other_texts(self) -> Iterator[str]:
        """Yield the other texts of several words, most of which are parts of messages, such as reasons."""
        docstrings = {node.value for node in ast.walk(self._tree) if isinstance(node, ast.Expr)}
        skipped: set[ast.AST] = {each for each in docstrings if isinstance(each, ast.Constant)} | {
            *self._calls
        }
        yield from dict.fromkeys(_texts(self._tree, skipped))

    def public(self, name: str) -> str:
        """Return the public class of an error."""
        return self._codes[name][1]


def _texts(node: ast.AST, skipped: set[ast.AST]) -> Iterator[str]:
    if node in skipped:
        return
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        words = _template(node).split()
        if len(words) >= _SENTENCE_WORDS:
            yield " ".join(words)
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child, skipped)


@cache
def _modules() -> Mapping[str, _Module]:
    folder = ROOT / "edgespec"
    paths = sorted(set(folder.rglob("*.py")) - {folder / "errors.py"})
    return {path.relative_to(folder).as_posix(): _Module(path) for path in paths}


def test_the_golden_file_holds_all_messages() -> None:
    """A reworded message appears in one reviewed diff."""
    expected = ""
    for name, module in _modules().items():
        lines = []
        for kind, code, texts in module.errors():
            lines += [f"  {kind} {code}", *(f"      {each}" for each in texts if each), ""]
        # The user interfaces' other texts are not about errors.
        if not name.startswith(("cli/", "tui/")):
            lines += [f"  {each}" for each in module.other_texts()]
        if lines:
            expected += "\n".join([name, *lines]).rstrip() + "\n\n"
    if os.environ.get("WRITE_DOCS"):
        _GOLDEN.write_text(expected, "utf-8", newline="\n")
    shown = _GOLDEN.read_text("utf-8")
    diff = difflib.unified_diff(
        shown.splitlines(), expected.splitlines(), _GOLDEN.name, "source", lineterm=""
    )
    assert shown == expected, "\n".join(["run this test with WRITE_DOCS=1, and review the changes", *diff])


def test_the_page_lists_all_codes() -> None:
    codes: dict[str, set[str]] = {name: set() for name in _CLASSES}
    server = {"internal_error", "unavailable"}
    for module in _modules().values():
        for name, code, _ in module.errors():
            if code.isidentifier():
                (server if name in _SERVER else codes[module.public(name)]).add(code)
    rows = ["| class | raised | codes |", "| --- | --- | --- |"]
    for name, found in sorted(codes.items()):
        kind = _CLASSES[name]
        listed = ", ".join(f"`{each}`" for each in (kind.code, *sorted(found - {kind.code})))
        reason = "for other failures"
        if (doc := inspect.getdoc(kind) or "").startswith("Raised "):
            reason = doc.partition(". ")[0].removeprefix("Raised ").rstrip(".")
        rows.append(f"| `{name}` | {reason} | {listed} |")
    listed = ", ".join(f"`{each}`" for each in sorted(server - set().union(*codes.values())))
    check_block("errors.md", "codes", "\n".join(["", *rows, "", f"The server adds {listed}.", "", ""]))
