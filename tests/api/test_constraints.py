"""Constrained replies: they satisfy the constraint, and every method gives the tokens of plain decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel

import edgespec
from edgespec import Runtime
from edgespec.api.loading import always_draft
from edgespec.errors import OptionError
from edgespec.options.settings import REPLY_OPTIONS
from tests.api.questions import HOWTO
from tests.cases import covering, first
from tests.raising import raises

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "parent": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/person"}]},
    },
    "required": ["name", "age", "tags", "parent"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"schema": SCHEMA},
    {"regex": r"\d{4}-\d{2}-\d{2}T(morning|evening) in [a-z]{3,12}\."},
    {"grammar": 'start: item ("; " item){1,3}\nitem: "- " /[a-z]{2,10}/ (" done" | " to do")'},
    {"choice": ("Use `ls -S`.", "Use `ls -l`.", "Ask somebody.")},
)
METHODS = ("grammar", "model", "suffix", "model+grammar+suffix", "auto")
# MLX models are slower. `test_parity.py` compares constrained replies of every drafter with plain decoding on
# MLX.
MLX_METHODS = ("grammar", "model+grammar+suffix")
TEMPERATURES = (0.0, 0.8, 1.2)
# The demo model's replies are short if the constraint leaves it few choices.
MAX_TOKENS = 60


class Person(BaseModel):
    name: str
    kind: Literal["cat", "dog"]
    weight: float | None = None


# The small MLX model is five times as fast as the large one, whose trees `test_tool_calls.py` constrains.
@pytest.fixture(scope="module", params=["demo", "demo-mlx-draft"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with always_draft(), edgespec.load(request.param, "demo-draft", methods=METHODS, context=1024) as runtime:
        yield runtime


@pytest.fixture(scope="module", params=first(["demo", "demo-mlx-draft"]))
def trees(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    options: dict[str, Any] = {"draft_branches": (3, 2), "method": "model", "context": 1024}
    with edgespec.load(request.param, "demo-draft", **options) as runtime:
        yield runtime


def check(text: str, options: dict[str, Any]) -> None:
    """Check that a whole reply satisfies its constraint."""
    if "schema" in options:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif "choice" in options:
        assert text in options["choice"]
    else:
        pattern = options.get("regex") or r"- [a-z]{2,10} (done|to do)(; - [a-z]{2,10} (done|to do)){1,3}"
        assert re.fullmatch(str(pattern), text)


def compare(runtime: Runtime, methods: tuple[str, ...], options: dict[str, Any], temperature: float) -> None:
    settings: dict[str, Any] = {**options, "temperature": temperature, "seed": 4, "max_tokens": MAX_TOKENS}
    plain = runtime.generate(HOWTO, **{**settings, "method": "none"})
    assert plain.finish_reason == "stop"
    check(plain.text, options)
    for method in methods:
        other = runtime.generate(HOWTO, **{**settings, "method": method, "draft_length": 6})
        assert other.tokens == plain.tokens, f"{method}: {other.text}"


@pytest.mark.parametrize(
    ("options", "temperature"),
    covering(CONSTRAINTS, TEMPERATURES),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
class TestTheSameTokens:
    @pytest.mark.long
    def test_chains(self, runtime: Runtime, options: dict[str, Any], temperature: float) -> None:
        is_gguf = runtime.target.name == "demo"
        compare(runtime, METHODS if is_gguf else MLX_METHODS, options, temperature)

    @pytest.mark.long
    def test_trees(self, trees: Runtime, options: dict[str, Any], temperature: float) -> None:
        compare(trees, ("model", "model+grammar"), options, temperature)


class TestDraftingWhatIsForced:
    @pytest.mark.long
    def test_grammar_saves_passes(self, runtime: Runtime) -> None:
        options: dict[str, Any] = {"schema": SCHEMA, "seed": 1, "draft_length": 16, "temperature": 0.0}
        plain = runtime.generate(HOWTO, method="none", **options)
        drafted = runtime.generate(HOWTO, method="grammar", **options)
        assert drafted.stats.target_passes < plain.stats.target_passes / 2
        assert drafted.stats.acceptance_rate == 1.0
        assert drafted.tokens == plain.tokens

    @pytest.mark.long
    def test_auto_uses_grammar_only_with_a_constraint(self, runtime: Runtime) -> None:
        reply = runtime.generate(HOWTO, schema=SCHEMA, method="auto", seed=1)
        assert "grammar" in reply.method.effective
        assert "grammar" not in runtime.generate(HOWTO, method="auto", seed=1, max_tokens=9).method.effective

    def test_without_a_constraint_nothing_is_drafted(self, runtime: Runtime) -> None:
        reply = runtime.generate(HOWTO, method="grammar", max_tokens=9)
        assert reply.stats.drafted_tokens == 0


class TestRejection:
    @pytest.mark.long
    @pytest.mark.parametrize("method", first(["grammar", "model+grammar+suffix", "model", "suffix"], 2))
    def test_replies_satisfy_the_constraint(self, runtime: Runtime, method: str) -> None:
        for seed, options in enumerate(CONSTRAINTS):
            settings: dict[str, Any] = {**options, "method": method, "acceptance": "rejection", "seed": seed}
            reply = runtime.generate(HOWTO, **settings)
            assert reply.finish_reason == "stop"
            check(reply.text, options)


class TestOptions:
    def test_a_pydantic_model(self, runtime: Runtime) -> None:
        reply = runtime.generate(HOWTO, schema=Person, seed=2, max_tokens=400)
        if reply.finish_reason == "stop":
            Person.model_validate_json(reply.text)
        assert reply.text.startswith('{"name": "')

    def test_a_schema_as_text(self, runtime: Runtime) -> None:
        assert runtime.generate(HOWTO, schema='{"const": [1, 2]}').text == "[1, 2]"

    def test_stop_strings_and_penalties_apply_as_well(self, runtime: Runtime) -> None:
        reply = runtime.generate(HOWTO, schema='{"const": [1, 2]}', stop=",", repetition_penalty=1.5)
        # The answer would violate the schema if it ended at the comma.
        assert reply.text == "[1, 2]"

    def test_a_continued_reply(self, runtime: Runtime) -> None:
        messages = [edgespec.Message("user", HOWTO)]
        stream = runtime.stream_messages(messages, reply_start="Use `l", choice=("Use `ls`.", "Ask."))
        assert stream.wait().text == "s`."
        with raises(OptionError, "'Never'", "list of choices", code="constraint_violated"):
            runtime.stream_messages(messages, reply_start="Never", choice=("Use `ls`.", "Ask."))

    def test_pydantic_models_have_no_other_properties(self) -> None:
        class Open(BaseModel, extra="allow"):
            a: int

        class Closed(BaseModel):
            a: Open

        schema = json.loads(REPLY_OPTIONS["schema"].check("schema", Closed))
        assert schema["additionalProperties"] is False
        assert schema["$defs"]["Open"]["additionalProperties"] is True

    @pytest.mark.parametrize(
        ("options", "code", "message"),
        [
            ({"schema": SCHEMA, "regex": "a"}, "option_conflict", "schema and regex"),
            ({"schema": "{"}, "constraint_invalid", "schema"),
            ({"schema": "[1]"}, "constraint_invalid", "schema"),
            ({"schema": {"a": object()}}, "constraint_invalid", "schema"),
            ({"schema": int}, "constraint_invalid", "int"),
            (
                {"schema": {"type": "integer", "minimum": 3, "maximum": 2}},
                "constraint_not_supported",
                "Unsatisfiable schema",
            ),
            (
                {"schema": {"$ref": "https://example.com/schema.json"}},
                "constraint_not_supported",
                "example.com",
            ),
            ({"regex": 3}, "option_invalid", "regex"),
            ({"regex": "("}, "constraint_invalid", "unclosed group"),
            ({"choice": [1]}, "option_invalid", "choice"),
            ({"choice": []}, "option_invalid", "choice"),
        ],
    )
    def test_what_is_refused(
        self, runtime: Runtime, options: dict[str, Any], code: str, message: str
    ) -> None:
        with raises(OptionError, message, code=code):
            runtime.generate(HOWTO, **options)
        with raises(OptionError, message, code=code):
            runtime.check_options(**options)
