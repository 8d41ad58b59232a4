"""The option declarations are complete, have valid defaults, and are the same wherever they are used."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import edgespec
from edgespec import SamplingParams
from edgespec.decode.request import ReplySettings
from edgespec.errors import OptionError
from edgespec.options.methods import readers_of
from edgespec.options.option import Option
from edgespec.options.reply_options import CONSTRAINT_NAMES
from edgespec.options.settings import (
    LOAD_OPTIONS,
    MODEL_OPTIONS,
    REPLY_OPTIONS,
    SETTINGS,
    LoadArguments,
    ReplyArguments,
    check_load_arguments,
    unread_options,
)
from edgespec.store.reference import PathReference, parse_reference
from tests.raising import raises

ALL = {**MODEL_OPTIONS, **LOAD_OPTIONS, **REPLY_OPTIONS, **SETTINGS}


def test_declarations_are_complete() -> None:
    for name, option in ALL.items():
        assert option.help.endswith("."), name
        assert not option.default_text.endswith("."), name
        if option.default is not None:
            assert option.check(name, option.default) == option.default, name


def test_every_argument_is_declared() -> None:
    assert LoadArguments.__annotations__.keys() == LOAD_OPTIONS.keys()
    assert ReplyArguments.__annotations__.keys() == REPLY_OPTIONS.keys()


def test_every_load_option_is_read() -> None:
    """An option that nothing reads would be accepted and silently do nothing."""
    folder = Path(edgespec.__file__).parent
    text = "".join(
        path.read_text("utf-8") for path in folder.rglob("*.py") if folder / "cli" not in path.parents
    )
    unread = [name for name in LOAD_OPTIONS if f'["{name}"]' not in text]
    assert not unread, f"nothing outside the command line reads the load options {unread}"


def test_every_reply_option_reaches_the_reply() -> None:
    needed = REPLY_OPTIONS.keys() - {*SamplingParams.names()} - {*CONSTRAINT_NAMES}
    fields = {each.name for each in dataclasses.fields(ReplySettings)}
    extra = {"params", "constraint", "prompt_logprobs"}
    assert fields == needed | extra, "give ReplySettings (decode/request.py) a field for each reply option"


def test_every_field_of_sampling_params_is_an_option() -> None:
    missing = {*SamplingParams.names()} - REPLY_OPTIONS.keys()
    assert not missing, f"declare {missing} in ReplyArguments (options/reply_options.py), with a help text"


def test_sampling_arguments_have_the_types_of_sampling_params() -> None:
    declared, used = get_type_hints(ReplyArguments), get_type_hints(SamplingParams)
    assert {name: declared[name] for name in SamplingParams.names()} == {
        name: used[name] for name in SamplingParams.names()
    }


@pytest.mark.parametrize("function", [edgespec.load, edgespec.plan])
def test_load_and_plan_repeat_no_option(function: Any) -> None:
    assert list(inspect.signature(function).parameters) == ["target", "draft", "progress", "options"]


def test_defaults_are_filled_in() -> None:
    arguments = check_load_arguments({"context": 512})
    assert arguments["context"] == 512
    assert {**arguments, "context": None} == {name: each.default for name, each in LOAD_OPTIONS.items()}


@pytest.mark.parametrize("function", [edgespec.load, edgespec.plan])
def test_an_unknown_option_names_the_nearest(function: Any) -> None:
    with raises(OptionError, "'contxt'", "'context'", code="option_unknown"):
        function(contxt=512)


@pytest.mark.parametrize("method", ["swift", "swift+suffix"])
def test_the_error_for_a_removed_method_names_its_replacements(method: str) -> None:
    with raises(OptionError, "'swift'", "`ngram`", code="option_removed", option="method"):
        check_load_arguments({"method": method})


def test_one_number_of_branches_is_a_tree_of_depth_one() -> None:
    assert check_load_arguments({"draft_branches": 3})["draft_branches"] == (3,)


@pytest.mark.parametrize("value", [np.int64(5), np.uint8(5), np.int32(5)])
def test_integers_of_numpy_are_integers(value: Any) -> None:
    for name in ("max_tokens", "seed", "top_k", "draft_length"):
        checked = REPLY_OPTIONS[name].check(name, value)
        assert checked == 5
        assert type(checked) is int
    assert check_load_arguments({"context": np.int64(512)})["context"] == 512
    assert check_load_arguments({"draft_branches": value})["draft_branches"] == (5,)
    assert check_load_arguments({"memory": np.int64(8 << 30)})["memory"] == 8 << 30
    biases = REPLY_OPTIONS["logit_bias"].check("logit_bias", {value: np.float32(0.5)})
    assert json.dumps(biases) == '{"5": 0.5}'


@pytest.mark.parametrize("value", [np.float32(0.5), np.float16(0.5), np.float64(0.5), Fraction(1, 2)])
def test_numbers_of_numpy_are_numbers(value: Any) -> None:
    for name in ("temperature", "top_p", "repetition_penalty"):
        checked = REPLY_OPTIONS[name].check(name, value)
        assert checked == 0.5
        assert isinstance(checked, float)
    assert check_load_arguments({"max_loss": value})["max_loss"] == 0.5


@pytest.mark.parametrize("value", [np.bool_(True), np.float64(5), np.array([5, 6]), "5", np.int64(-7)])
def test_other_values_of_numpy_are_no_integers(value: Any) -> None:
    for name in ("max_tokens", "seed", "top_k"):
        with raises(OptionError, name):
            REPLY_OPTIONS[name].check(name, value)


def test_a_model_can_be_given_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("target", "draft"):
        check = MODEL_OPTIONS[name].check
        assert check(name, tmp_path / "demo") == str(tmp_path / "demo")
        assert isinstance(parse_reference(check(name, Path("demo"))), PathReference)
        assert check(name, Path("demo-draft")) == "demo-draft"
        with raises(OptionError, "a string"):
            check(name, b"demo")


@pytest.mark.parametrize(
    ("options", "code", "error"),
    [
        ({"context": 0}, "option_invalid", "16777216"),
        ({"context": 10}, "option_invalid", "16777216"),
        ({"context": 999999999}, "option_invalid", "999999999"),
        ({"threads": 5000}, "option_invalid", "integer"),
        ({"memory": "lots"}, "option_invalid", "'lots'"),
        ({"prefer": "both"}, "option_invalid", "speed, context"),
        ({"mmap": "no"}, "option_invalid", "'no'"),
        ({"method": "modl"}, "option_invalid", "'model'"),
        ({"methods": "suffix"}, "option_invalid", "'suffix'"),
        ({"draft_branches": (9, 9)}, "option_invalid", "would"),
        ({"max_loss": 2}, "option_invalid", "max_loss"),
        ({"method": "suffix", "draft_window": 9}, "option_without_effect", "suffix"),
    ],
)
def test_a_wrong_value_is_refused(options: dict[str, Any], code: str, error: str) -> None:
    with raises(OptionError, error, code=code):
        check_load_arguments(options)


def test_options_that_no_drafter_reads() -> None:
    assert "corpus" not in unread_options(["suffix"])
    assert "corpus" in unread_options(["model"])
    assert unread_options(["auto", "layerskip"]) == []


PAGE = """# Options

Options are written with dashes on the command line (`--draft-window`), and with underscores in Python and
in the settings file (`draft_window`). For environment variables, put `EDGESPEC_` before the name in capitals.

## Loading a model

`edgespec.load(target, draft, ...)` and `edgespec.plan(target, draft, ...)` take these options.

{load}
## Replies

`Runtime.generate(prompt, ...)` and the other methods that generate replies take these options.

{reply}"""


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_integers_larger_than_any_float_are_refused(number: int) -> None:
    for name, value in (("temperature", number), ("adapter_scales", {"style": number})):
        with raises(OptionError, "a number"):
            REPLY_OPTIONS[name].check(name, value)


def options_table(options: Mapping[str, Option]) -> str:
    lines = ["| option | default | what it does | used by |", "| --- | --- | --- | --- |"]
    for name, option in options.items():
        default = option.default_text or (
            "none" if option.default in (None, (), {}) else str(option.default).lower()
        )
        readers = ", ".join(readers_of(name)) or "every method"
        lines.append(f"| `{name}` | {default} | {option.help} | {readers} |".replace("|N", "\\|N"))
    return "\n".join(lines) + "\n"


def test_the_documentation_is_up_to_date() -> None:
    """To write the page, run this test with WRITE_DOCS=1."""
    load = options_table({**MODEL_OPTIONS, **LOAD_OPTIONS})
    text = PAGE.format(load=load, reply=options_table(REPLY_OPTIONS))
    page = Path(edgespec.__file__).parent.parent / "docs" / "options.md"
    if os.environ.get("WRITE_DOCS"):
        page.write_text(text, encoding="utf-8", newline="\n")
    assert page.read_text(encoding="utf-8") == text
