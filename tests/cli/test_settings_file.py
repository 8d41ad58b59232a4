"""Changing one setting leaves the rest of the file as it was."""

from __future__ import annotations

import copy
import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.options.settings_file import KeyPath, NotEditableError, changed, line_number

FILE = '''\
# Mine.
target = "8b-q4"  # the large one
stop = [
  "#",  # a comment
  """x""",
]
system = """
[chat]
temperature = 1
"""

# For talking.
[chat]
temperature = 0.6
'''


@pytest.mark.parametrize(
    ("path", "literal", "before", "after"),
    [
        (("target",), '"demo"', '"8b-q4"', '"demo"'),
        (("chat", "temperature"), "2.0", "0.6", "2.0"),
        (("stop",), "[]", '[\n  "#",  # a comment\n  """x""",\n]', "[]"),
        (("system",), '"Be brief."', '"""\n[chat]\ntemperature = 1\n"""', '"Be brief."'),
        (("seed",), "1", "\n\n# For", "\nseed = 1\n\n# For"),
        (("chat", "seed"), "1", "0.6\n", "0.6\nseed = 1\n"),
        (("verify", "threads"), "2", "0.6\n", "0.6\n\n[verify]\nthreads = 2\n"),
        (("target",), None, 'target = "8b-q4"  # the large one\n', ""),
        (("chat", "temperature"), None, "temperature = 0.6\n", ""),
        (("seed",), None, "", ""),
    ],
)
def test_one_value_changes(path: KeyPath, literal: str | None, before: str, after: str) -> None:
    assert changed(FILE, path, literal) == FILE.replace(before, after)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("", "seed = 1\n"),
        ("# Nothing yet.\n\n", "# Nothing yet.\nseed = 1\n"),
        ("# For talking.\n[chat]\nseed = 2\n", "seed = 1\n\n# For talking.\n[chat]\nseed = 2\n"),
        ("seed = 2\r\n[chat]\r\n", "seed = 1\r\n[chat]\r\n"),
        ("seed=2#old", "seed = 1  #old"),
        ("  'seed' = 2", "  'seed' = 1"),
        ('"#" = "#" # a\nseed = 2', '"#" = "#" # a\nseed = 1'),
    ],
)
def test_a_value_is_added_to_files_of_any_shape(text: str, after: str) -> None:
    assert changed(text, ("seed",), "1") == after


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("chat = { seed = 2 }", ("chat", "seed")),
        ("chat = { seed = 2, top_k = 3 }", ("chat", "seed")),
        ("chat.top_k = 3", ("chat", "seed")),
        ("[[chat]]\ntop_k = 3", ("chat", "seed")),
        ("chat = 3", ("chat", "seed")),
        ("'a=b' = 2", ("a=b",)),
    ],
)
def test_an_unsupported_form_is_refused(text: str, path: KeyPath) -> None:
    with pytest.raises(NotEditableError):
        changed(text, path, "1")


def test_a_dotted_key_is_supported() -> None:
    assert changed("chat.seed = 2\n", ("chat", "seed"), "1") == "chat.seed = 1\n"
    assert changed("chat.seed = 2\n", ("chat", "seed"), None) == ""


def test_line_numbers() -> None:
    assert [
        line_number(FILE, path) for path in (("target",), ("system",), ("chat",), ("chat", "temperature"))
    ] == [
        2,
        7,
        13,
        14,
    ]
    assert line_number(FILE, ("seed",)) is None


def as_file(table: dict[str, Any], remarks: list[str]) -> str:
    """A file that says this, with remarks between the lines."""
    lines = []
    for name, value in sorted(table.items(), key=lambda item: isinstance(item[1], dict)):
        inside = value.items() if isinstance(value, dict) else ()
        lines += [f"[{name}]"] if isinstance(value, dict) else [f"{name} = {json.dumps(value)}"]
        lines += [f"{key} = {json.dumps(each)} # {remarks[0]}" for key, each in inside]
        lines += [f"# {remark}" for remark in remarks]
    return "\n".join(lines)


VALUES = st.one_of(
    st.integers(0, 99), st.booleans(), st.lists(st.sampled_from(["#", "a ] b", "=", "[chat]"]))
)
TABLES = st.dictionaries(st.sampled_from("abc"), VALUES)
FILES = st.builds(
    lambda top, chat, tune: top | {"chat": chat} | ({"tune": tune} if tune else {}), TABLES, TABLES, TABLES
)


@pytest.mark.long
@given(
    table=FILES,
    remarks=st.lists(st.sampled_from(["a = 1", "[tune]", "it's", '"']), min_size=1, max_size=3),
    path=st.sampled_from([("a",), ("d",), ("chat", "a"), ("chat", "d"), ("tune", "a")]),
    literal=st.sampled_from(["7", "'x # y'", "[1,\n 2]", None]),
)
def test_a_change_leaves_all_other_values(
    table: dict[str, Any], remarks: list[str], path: KeyPath, literal: str | None
) -> None:
    text = as_file(table, remarks)
    result = changed(text, path, literal)
    wanted = copy.deepcopy(table)
    inside = wanted.setdefault(path[0], {}) if len(path) == 2 else wanted
    if literal is None:
        inside.pop(path[-1], None)
    else:
        inside[path[-1]] = tomllib.loads(f"x = {literal}")["x"]
    found = tomllib.loads(result)
    assert {name: value for name, value in found.items() if value != {}} == {
        name: value for name, value in wanted.items() if value != {}
    }
    before = [line for line in text.split("\n") if line.startswith("#")]
    assert [line for line in result.split("\n") if line.startswith("#")] == before
