"""The records of the drafting methods, and the tables generated from them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import edgespec
from edgespec.errors import OptionError
from edgespec.options.methods import (
    head_names,
    method,
    method_names,
    methods,
    methods_by_need,
    parse_method,
    readers_of,
    register,
)
from edgespec.options.settings import LOAD_OPTIONS
from tests.docs import check_block
from tests.raising import raises


def test_every_folder_with_a_record_is_a_method() -> None:
    folder = Path(edgespec.__file__).parent / "methods"
    named = {path.parent.name for path in folder.glob("*/__init__.py") if "METHOD" in path.read_text("utf-8")}
    assert set(method_names()) == named


def test_methods_read_options_that_exist() -> None:
    for each in methods():
        assert each.reads <= LOAD_OPTIONS.keys(), each.name
        assert all(each.name in readers_of(option) for option in each.reads)


def test_drafts_are_merged_in_the_order_of_the_records() -> None:
    """Merging prefers earlier drafts, so a changed order changes which tokens are drafted."""
    known = [
        "layerskip",
        "lowbit",
        "mtp",
        "eagle",
        "dflash",
        "medusa",
        "hydra",
        "model",
        "lookahead",
        "grammar",
        "suffix",
        "ngram",
    ]
    names = method_names()
    assert [name for name in names if name in known] == [name for name in known if name in names]
    assert parse_method("auto") == (*head_names(), "model", "grammar", "suffix")


def test_a_registered_method_is_known_until_it_is_removed() -> None:
    unregister = register(replace(method("ngram"), name="twin", order=5, uses_target_cache=True))
    try:
        assert method_names()[0] == "twin"
        assert parse_method("twin+suffix") == ("twin", "suffix")
        with raises(OptionError, "2 methods", option="method"):
            parse_method("twin+lowbit")
    finally:
        unregister()
    with raises(OptionError, "is unknown", option="method"):
        parse_method("twin")
    unregister()


@pytest.mark.parametrize("name", ["auto", "none", "suffix", "", "a+b", "Upper", "a-b", "1st"])
def test_names_that_no_method_can_have(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be named"):
        register(replace(method("ngram"), name=name))


def test_reading_the_records_loads_no_drafter() -> None:
    """`edgespec --help` lists the methods, and must not import NumPy or a backend."""
    code = (
        "import sys; from edgespec.options.methods import methods; methods();"
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'numpy', 'mlx', 'llama_cpp', 'gguf'}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""


def test_the_tables_of_methods() -> None:
    rows = [
        f"| `{each.name}` | {each.docs.source} | {each.docs.requires} | {each.docs.memory} |"
        for each in methods_by_need()
    ]
    head = ["| method | source of draft tokens | requires | extra memory |", "|---|---|---|---|"]
    check_block("methods.md", "methods", "\n".join([*head, *rows, ""]))
    rows = [
        f"| `{each.name}` | {each.help}{' (experimental)' if each.experimental else ''} |"
        for each in methods_by_need()
    ]
    head = ["| method | where the draft tokens come from |", "|---|---|"]
    check_block("../README.md", "methods", "\n".join([*head, *rows, ""]))
