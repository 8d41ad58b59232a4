"""The constraint processor: masks, drafts and rollback, reasoning, and rejected constraints."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.constraints import processor as processor_module
from edgespec.constraints.compiler import ConstraintCompiler
from edgespec.constraints.matcher import Constraint, new_matcher, text_of
from edgespec.constraints.processor import ConstraintProcessor
from edgespec.constraints.tokenizer import ConstraintTokenizer
from edgespec.errors import CapabilityError, OptionError
from tests.constraints.vocabularies import END, ByteVocabulary
from tests.raising import raises

PIECES = (b'{"', b'": ', b'", "', b"name", b"true", b"ab", b"abc", b"  ", b"\n\n", b"12")
INVALID, REFUSED = "constraint_invalid", "constraint_not_supported"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "ok": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "ok"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    Constraint("schema", json.dumps(SCHEMA)),
    Constraint("regex", "(ab|abc)+[0-9]{2}|x"),
    Constraint("grammar", 'start: pair ("," pair)*\npair: /[a-c]+/ "=" ("12" | "true")'),
    Constraint("choice", ("abc", "abd", "true", 'a "quoted"\nline')),
)
VOCABULARY = ByteVocabulary(PIECES)
COMPILER = ConstraintCompiler(VOCABULARY, VOCABULARY.size)
TOKENIZER = ConstraintTokenizer(VOCABULARY, VOCABULARY.size)


def processor(constraint: Constraint) -> ConstraintProcessor:
    return COMPILER.processor(constraint, [END])


def allowed(constrained: ConstraintProcessor, size: int = VOCABULARY.size) -> list[int]:
    tokens, _ = constrained.apply((np.arange(size), np.zeros(size)))
    return [int(token) for token in tokens]


def allowed_by_matcher(constraint: Constraint, path: list[int]) -> list[int]:
    """Return the tokens that a new matcher allows after a path, or all if the path ends or is forbidden."""
    matcher = new_matcher(constraint.option, text_of(constraint), TOKENIZER.for_llguidance)
    if END in path or matcher.try_consume_tokens(path) < len(path):
        return [*range(VOCABULARY.size)]
    return [int(token) for token in np.flatnonzero(TOKENIZER.unpacked(matcher.compute_bitmask()))]


def allowed_after(constraint: Constraint, text: str) -> str:
    """Return the single bytes that are allowed after a text, with `$` for the end of the reply."""
    constrained = processor(constraint)
    for token in VOCABULARY.tokenize(text, special=False, start=False):
        constrained.push(token)
    tokens = allowed(constrained)
    return "".join("$" if token == END else chr(token - 1) for token in tokens if token < 257)


class TestMasks:
    def test_the_mask_follows_the_text(self) -> None:
        regex = Constraint("regex", "a[0-9]?x")
        assert allowed_after(regex, "") == "a"
        assert allowed_after(regex, "a") == "0123456789x"
        assert allowed_after(regex, "a1") == "x"

    def test_a_complete_text_ends_the_reply(self) -> None:
        assert allowed_after(Constraint("regex", "ab?"), "a") == "$b"
        assert allowed_after(Constraint("regex", "ab?"), "ab") == "$"

    def test_json_has_no_spare_whitespace(self) -> None:
        assert allowed_after(CONSTRAINTS[0], "") == "", 'only the longer token `{"` is allowed'
        assert allowed_after(CONSTRAINTS[0], '{"name": "a"') == ","
        assert allowed_after(CONSTRAINTS[0], '{"name": "a",') == " "

    def test_only_the_given_candidates_are_kept(self) -> None:
        constrained = processor(Constraint("regex", "[a-c]"))
        given = np.array([ord("a") + 1, ord("b") + 1, ord("x") + 1])
        tokens, logits = constrained.apply((given, np.array([1.0, 2.0, 3.0])))
        assert tokens.tolist() == given[:2].tolist()
        assert logits.tolist() == [1.0, 2.0]

    def test_logits_beyond_the_vocabulary_are_forbidden(self) -> None:
        compiler = ConstraintCompiler(VOCABULARY, VOCABULARY.size + 7)
        constrained = compiler.processor(Constraint("regex", "."), [END])
        assert max(allowed(constrained, VOCABULARY.size + 7)) < VOCABULARY.size


class TestDraftsAndRollback:
    @pytest.mark.long
    @settings(max_examples=60)
    @given(st.sampled_from(CONSTRAINTS), st.data())
    def test_pop_restores_the_state(self, constraint: Constraint, data: st.DataObject) -> None:
        """After any pushes and pops, the mask is that of a new processor after the same tokens."""
        constrained, path = processor(constraint), list[int]()
        for _ in range(data.draw(st.integers(1, 40))):
            if data.draw(st.booleans()) and path:
                count = data.draw(st.integers(1, len(path)))
                constrained.pop(count)
                del path[-count:]
            else:
                # Use mostly tokens that the constraint allows, but also others, as in unmasked drafts.
                choices = allowed(constrained) if data.draw(st.integers(0, 4)) else [*range(VOCABULARY.size)]
                path.append(data.draw(st.sampled_from(choices)))
                constrained.push(path[-1])
            if data.draw(st.booleans()):
                fresh = processor(constraint)
                for token in path:
                    fresh.push(token)
                assert allowed(constrained) == allowed(fresh)
                assert constrained.forced_tokens(8) == fresh.forced_tokens(8)

    @pytest.mark.long
    @settings(max_examples=40)
    @given(st.sampled_from(CONSTRAINTS), st.integers(1, 4), st.data())
    def test_each_node_of_a_tree_has_the_mask_of_a_new_matcher(
        self, constraint: Constraint, max_masks: int, data: st.DataObject
    ) -> None:
        """Visit the nodes of a random tree in any order, with so few cached masks that most are dropped."""
        paths: list[list[int]] = [[]]
        for _ in range(data.draw(st.integers(1, 12))):
            parent = data.draw(st.sampled_from(paths))
            is_valid = data.draw(st.integers(0, 4)) > 0
            choices = allowed_by_matcher(constraint, parent) if is_valid else [*range(VOCABULARY.size)]
            paths.append([*parent, data.draw(st.sampled_from(choices))])
        constrained, here = processor(constraint), list[int]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processor_module, "_MAX_MASKS", max_masks)
            for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=20)):
                equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(here, path, strict=False))
                common = len(list(equal))
                constrained.pop(len(here) - common)
                for token in path[common:]:
                    constrained.push(token)
                here = path
                assert allowed(constrained) == allowed_by_matcher(constraint, path)

    def test_a_forbidden_token_leaves_the_other_branches_intact(self) -> None:
        constrained = processor(Constraint("regex", "ab12"))
        before = allowed(constrained)
        constrained.push(ord("z") + 1)
        assert len(allowed(constrained)) == VOCABULARY.size
        constrained.push(ord("a") + 1)
        constrained.pop(2)
        assert allowed(constrained) == before

    def test_nothing_is_constrained_after_the_end(self) -> None:
        constrained = processor(Constraint("regex", "a"))
        for token in (ord("a") + 1, END, ord("a") + 1):
            constrained.push(token)
        assert len(allowed(constrained)) == VOCABULARY.size
        constrained.pop(2)
        assert allowed(constrained) == [END]

    def test_a_long_text_stays_exact_after_masks_are_dropped(self) -> None:
        constrained = processor(Constraint("regex", "(abc)*"))
        for _ in range(200):
            for byte in b"abc":
                assert byte + 1 in allowed(constrained)
                constrained.push(byte + 1)
        constrained.pop(599)
        assert ord("b") + 1 in allowed(constrained)


class TestForcedTokens:
    def test_they_include_the_end_of_the_reply(self) -> None:
        constrained = processor(Constraint("choice", ("abd",)))
        forced = constrained.forced_tokens(10)
        assert VOCABULARY.text(forced) == "abd"
        assert forced[-1] == END

    def test_they_stop_where_the_model_can_choose(self) -> None:
        assert VOCABULARY.text(processor(CONSTRAINTS[0]).forced_tokens(16)).startswith('{"name"')
        assert processor(Constraint("regex", "[ab]c")).forced_tokens(5) == []

    def test_there_are_no_more_than_requested(self) -> None:
        assert len(processor(CONSTRAINTS[0]).forced_tokens(2)) == 2

    def test_every_forced_token_is_allowed(self) -> None:
        for constraint in CONSTRAINTS:
            constrained = processor(constraint)
            for token in constrained.forced_tokens(20):
                assert token in allowed(constrained)
                constrained.push(token)


class TestReasoning:
    vocabulary = ByteVocabulary(PIECES, (b"<think>", b"</think>"), "a template with <think>")
    open, close = vocabulary.size - 2, vocabulary.size - 1

    def constrained(self, regex: str, prompt: str = "", reply_start: str = "") -> ConstraintProcessor:
        compiler = ConstraintCompiler(self.vocabulary, self.vocabulary.size)
        tokens = self.vocabulary.tokenize(prompt, special=True, start=False)
        return compiler.processor(Constraint("regex", regex), [END, *tokens], reply_start)

    def allowed(self, constrained: ConstraintProcessor) -> list[int]:
        return allowed(constrained, self.vocabulary.size)

    def push(self, constrained: ConstraintProcessor, *parts: str | int) -> None:
        for part in parts:
            tokens = (
                [part]
                if isinstance(part, int)
                else self.vocabulary.tokenize(part, special=False, start=False)
            )
            for token in tokens:
                constrained.push(token)

    def test_the_model_may_reason_before_the_answer(self) -> None:
        constrained = self.constrained("[xy]")
        assert self.allowed(constrained) == [ord("x") + 1, ord("y") + 1, self.open]
        self.push(constrained, self.open)
        assert self.allowed(constrained) == [t for t in range(self.vocabulary.size) if t != END]
        self.push(constrained, "hm", self.close)
        space = [t for t in range(self.vocabulary.size) if self.vocabulary.piece(t).isspace()]
        assert self.allowed(constrained) == sorted([ord("x") + 1, ord("y") + 1, *space])
        self.push(constrained, "\n\n")
        assert self.allowed(constrained) == [ord("x") + 1, ord("y") + 1]
        self.push(constrained, "x")
        assert self.allowed(constrained) == [END]
        constrained.pop(3)
        assert self.open in self.allowed(constrained)

    def test_a_prompt_can_open_the_reasoning(self) -> None:
        constrained = self.constrained("x", "<think>\n", "<think>\n")
        assert len(self.allowed(constrained)) == self.vocabulary.size - 1
        self.push(constrained, "no", self.close, "x")
        assert self.allowed(constrained) == [END]

    def test_a_prompt_can_end_the_reasoning(self) -> None:
        assert self.allowed(self.constrained("x", "<think></think>\n\n")) == [ord("x") + 1]

    @pytest.mark.parametrize("reply_start", ["ab", "<think>hm</think>\n\nab"])
    def test_an_answer_can_be_continued(self, reply_start: str) -> None:
        constrained = self.constrained("abx", reply_start, reply_start)
        assert self.allowed(constrained) == [ord("x") + 1]
        with raises(OptionError, "'ab'", "regular expression", code="constraint_violated"):
            self.constrained("ax", reply_start, reply_start)

    def test_a_marker_of_several_tokens(self) -> None:
        """Without control tokens, a marker is text, and a token can contain the end of a marker and more."""
        vocabulary = ByteVocabulary((b"think", b">x", b">\n"), (), "a template with <think>")
        compiler = ConstraintCompiler(vocabulary, vocabulary.size)
        constrained = compiler.processor(Constraint("regex", "x"), [END])
        tokens = vocabulary.tokenize("<think>hm</think", special=False, start=False)
        for token in tokens:
            assert token in allowed(constrained, vocabulary.size)
            constrained.push(token)
        assert 258 not in allowed(constrained, vocabulary.size), "`>x` would hide the start of the answer"
        constrained.push(259)
        assert allowed(constrained, vocabulary.size) == [ord("x") + 1]

    def test_an_answer_that_starts_like_the_marker_is_not_reasoning(self) -> None:
        vocabulary = ByteVocabulary((), (), "a template with <think>")
        compiler = ConstraintCompiler(vocabulary, vocabulary.size)
        constrained = compiler.processor(Constraint("regex", "<a>"), [END])
        constrained.push(ord("<") + 1)
        assert allowed(constrained, vocabulary.size) == [ord("a") + 1]

    def test_a_template_without_markers_allows_no_reasoning(self) -> None:
        vocabulary = ByteVocabulary((), (b"<think>", b"</think>"), "a template")
        compiler = ConstraintCompiler(vocabulary, vocabulary.size)
        constrained = compiler.processor(Constraint("regex", "x"), [END])
        assert allowed(constrained, vocabulary.size) == [ord("x") + 1]


class TestRefused:
    @pytest.mark.parametrize(
        ("option", "value", "code", "message"),
        [
            ("schema", '{"type": "integer", "minimum": 5, "maximum": 3}', REFUSED, "minimum"),
            ("schema", '{"properties": {"a": {"uniqueItems": true}}}', REFUSED, "uniqueItems"),
            ("schema", '{"$ref": "http://example.com/a"}', REFUSED, "http://example.com/a"),
            ("schema", '{"$ref": "file:///etc/passwd"}', REFUSED, "file:///etc/passwd"),
            ("schema", '{"$ref": "#/$defs/missing"}', REFUSED, "missing"),
            ("schema", '{"type": "objekt"}', REFUSED, "objekt"),
            (
                "schema",
                '{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}',
                REFUSED,
                "no text",
            ),
            ("schema", '{"a":' * 5000 + "1" + "}" * 5000, REFUSED, "recursion limit"),
            ("regex", "(a", INVALID, "unclosed group"),
            ("regex", "(?=a)a", INVALID, "look-around"),
            ("regex", r"\byes\b", REFUSED, "word boundary"),
            ("regex", r"a\Bb", REFUSED, "word boundary"),
            ("regex", "(?m)^a$", REFUSED, "is not"),
            ("regex", r"a\Ab", REFUSED, "is not"),
            ("regex", r"[^\s\S]", REFUSED, "no text"),
            ("regex", "(" * 100_000, INVALID, "unclosed group"),
            ("regex", "a" * 300_000, REFUSED, "300,000 characters"),
            ("grammar", "start: missing", REFUSED, "missing"),
            ("grammar", "", REFUSED, "Empty grammar"),
            ("grammar", 'root ::= "yes" | "no"', INVALID, "looks"),
            ("grammar", "start: start", REFUSED, "no text"),
            ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, REFUSED, "too deeply nested"),
        ],
        ids=itertools.count(),
    )
    def test_a_constraint_that_cannot_be_used(self, option: str, value: Any, code: str, message: str) -> None:
        with raises(OptionError, message, code=code) as caught:
            COMPILER.check(Constraint(option, value))
        assert len(str(caught.value)) < 600
        assert caught.value.next_step

    def test_a_vocabulary_without_an_end(self) -> None:
        vocabulary = ByteVocabulary()
        vocabulary.is_end = lambda _: False  # type: ignore[method-assign, assignment]
        with raises(CapabilityError, "ends a reply"):
            ConstraintCompiler(vocabulary, vocabulary.size).check(CONSTRAINTS[1])

    @pytest.mark.long
    @pytest.mark.parametrize(
        "constraint",
        [
            Constraint("regex", "(a{100}){100}b"),
            Constraint("regex", "(a|b)*a(a|b){30}"),
            Constraint(
                "schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1000)}})
            ),
            Constraint(
                "grammar",
                "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"',
            ),
        ],
        ids=itertools.count(),
    )
    def test_an_expensive_constraint_works_or_ends_with_an_error(self, constraint: Constraint) -> None:
        constrained = processor(constraint)
        rng = np.random.default_rng(0)
        try:
            for _ in range(100):
                constrained.push(int(rng.choice(allowed(constrained))))
        except OptionError as error:
            assert "too complex" in error.what  # noqa: PT017
