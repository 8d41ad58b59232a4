"""`tests/messages.txt` holds every error message, and `docs/errors.md` every code.

After changing a message, run `WRITE_DOCS=1 pytest tests/test_messages.py`, and review the change in the file.
Other tests assert the class and code of an error, so that a message can be reworded without changing them.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from edgespec import errors
from edgespec.errors import EdgespecError
from tests.docs import ROOT, check_block

GOLDEN = Path(__file__).with_name("messages.txt")
FUNCTIONS = {"ApiError", "invalid_request"}
CLASSES: Mapping[str, type[EdgespecError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, EdgespecError)
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def called(node: ast.AST) -> str:
    """The name of the function or class that a node calls, without its module or object."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def template(node: ast.expr) -> str:
    """The text of an expression, with `{name}` for each value."""
    match node:
        case ast.Constant(str(value)):
            return value
        case ast.JoinedStr(parts):
            return "".join(map(template, parts))
        case ast.FormattedValue(value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left, ast.Add(), right):
            return template(left) + template(right)
        case ast.IfExp(_, then, otherwise):
            return f"({template(then)} | {template(otherwise)})"
        case _:
            return f"{{{ast.unparse(node)}}}"


def sentences(node: ast.AST) -> Iterator[str]:
    """The texts of several words in an expression, but not those within other texts."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        if " " in (text := template(node).strip()):
            yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from sentences(child)


class Module:
    """The errors of one module, and the texts that become parts of their messages."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text("utf-8"))
        kinds = {*CLASSES, *FUNCTIONS}
        self.codes = {name: kind.code for name, kind in CLASSES.items()}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef) and (
                bases := {ast.unparse(base) for base in node.bases} & kinds
            ):
                kinds.add(node.name)
                own = [
                    each.value.value
                    for each in node.body
                    if isinstance(each, ast.Assign)
                    and ast.unparse(each.targets[0]) == "code"
                    and isinstance(each.value, ast.Constant)
                ]
                self.codes[node.name] = str(own[0]) if own else self.codes.get(min(bases), "")
        self.found: list[tuple[ast.Call, Function | None]] = []
        self.functions: dict[str, Function] = {}
        self._visit(self.tree, None, kinds)

    def _visit(self, node: ast.AST, function: Function | None, kinds: set[str]) -> None:
        if isinstance(node, Function):
            self.functions[node.name] = function = node
        if called(node) in kinds:
            assert isinstance(node, ast.Call)
            self.found.append((node, function))
        for child in ast.iter_child_nodes(node):
            self._visit(child, function, kinds)

    def code(self, call: ast.Call) -> str:
        given = next((each.value for each in call.keywords if each.arg == "code"), None)
        if called(call) == "ApiError" and len(call.args) > 3:
            given = call.args[3]
        if given is not None:
            return template(given)
        return self.codes.get(called(call), "invalid_request")

    def messages(self) -> Iterator[str]:
        for call, _ in self.found:
            texts = [
                each
                for each in call.args
                if not isinstance(each, ast.Constant) or each.value not in (400, 404)
            ]
            shown = [" ".join(template(each).split()) for each in texts]
            yield f"  {called(call)} {self.code(call)}\n" + "".join(
                f"      {each}\n" for each in shown if each
            )

    def parts(self) -> list[str]:
        """Texts that variables, functions and arguments put into messages."""
        places: dict[str, list[ast.AST]] = defaultdict(list)
        helpers: dict[str, Function] = {}
        for call, function in self.found:
            names = {
                node.id for argument in call.args for node in ast.walk(argument) if isinstance(node, ast.Name)
            }
            if function and names & {each.arg for each in function.args.args}:
                helpers[function.name] = function
            for node in (*ast.walk(function or self.tree), *self.tree.body):
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.AugAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    assigned = {
                        each.id
                        for target in targets
                        for each in ast.walk(target)
                        if isinstance(each, ast.Name)
                    }
                    if node.value and (hit := assigned & names):
                        places[min(hit)].append(node.value)
            for name in names & self.functions.keys():
                places[name] += [
                    each for each in ast.walk(self.functions[name]) if isinstance(each, ast.Return)
                ]
        for node in ast.walk(self.tree):
            if (name := called(node)) in helpers and isinstance(node, ast.Call):
                places[name] += [*node.args, *(each.value for each in node.keywords)]
        found = {
            f"{name}: {' '.join(text.split())}": None
            for name in places
            for place in places[name]
            for text in sentences(place)
        }
        return list(found)


@cache
def modules() -> dict[str, Module]:
    folder = ROOT / "edgespec"
    paths = sorted(set(folder.rglob("*.py")) - {folder / "errors.py"})
    return {path.relative_to(folder).as_posix(): Module(path) for path in paths}


def test_the_golden_file_holds_all_messages() -> None:
    """A reworded message appears in one reviewed diff."""
    expected = ""
    for name, module in modules().items():
        if module.found:
            parts = "".join(f"  {each}\n" for each in module.parts())
            expected += "\n".join([name, *module.messages(), parts]) + ("\n" if parts else "")
    if os.environ.get("WRITE_DOCS"):
        GOLDEN.write_text(expected, "utf-8", newline="\n")
    shown = GOLDEN.read_text("utf-8")
    diff = difflib.unified_diff(shown.splitlines(), expected.splitlines(), GOLDEN.name, "source", lineterm="")
    assert shown == expected, "\n".join(["run this test with WRITE_DOCS=1, and review the changes", *diff])


def test_the_page_lists_all_codes() -> None:
    codes: dict[str, set[str]] = {name: {kind.code} for name, kind in CLASSES.items()}
    server = {"internal_error", "unavailable"}
    for module in modules().values():
        for call, _ in module.found:
            if (code := module.code(call)).isidentifier():
                (server if called(call) in FUNCTIONS else codes[kind_of(module, called(call))]).add(code)
    rows = ["| class | raised | codes |", "| --- | --- | --- |"]
    for name, found in sorted(codes.items()):
        default = CLASSES[name].code
        listed = ", ".join(f"`{each}`" for each in (default, *sorted(found - {default})))
        reason = "for other failures"
        if (doc := inspect.getdoc(CLASSES[name]) or "").startswith("Raised "):
            reason = doc.partition(". ")[0].removeprefix("Raised ").rstrip(".")
        rows.append(f"| `{name}` | {reason} | {listed} |")
    listed = ", ".join(f"`{each}`" for each in sorted(server - set().union(*codes.values())))
    check_block("errors.md", "codes", "\n".join(["", *rows, "", f"The server adds {listed}.", "", ""]))


def kind_of(module: Module, name: str) -> str:
    """The public class of an error, which can be a subclass in its module."""
    while name not in CLASSES:
        node = next(
            each for each in ast.walk(module.tree) if isinstance(each, ast.ClassDef) and each.name == name
        )
        name = ast.unparse(node.bases[0])
    return name
