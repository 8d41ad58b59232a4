"""Compile constraints for the vocabulary of a model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from edgespec.backends.base import Vocabulary
from edgespec.constraints.answer_start import AnswerStart
from edgespec.constraints.processor import ConstraintProcessor
from edgespec.constraints.specification import Constraint
from edgespec.constraints.tokenizer import ConstraintTokenizer
from edgespec.errors import OptionError

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

__all__ = ["ConstraintCompiler"]

# Maximum length of a constraint, in characters. Compiling one of this length takes a few seconds at most.
_MAX_CHARACTERS = 1 << 18
# Maximum length of a text quoted in an error message, in characters.
_MAX_SHOWN_CHARACTERS = 300
# Match the reason in llguidance's error messages about regular expressions and JSON schemas.
_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_UNSUPPORTED_KEYWORDS = re.compile(r"Unimplemented keys: \[(.+)\]", re.DOTALL)
# Matches the beginning of a rule in llama.cpp's grammars.
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# Number of compiled constraints to keep, because programs often use the same schema for every request.
_MAX_COMPILED = 8


class _Kind(NamedTuple):
    name: str
    hint: str


_KINDS = {
    "schema": _Kind("JSON schema", "change this part of the schema, or remove it"),
    "regex": _Kind("regular expression", "use the syntax of Rust's regex package, without look-around"),
    "grammar": _Kind("grammar", "correct the grammar; llguidance's documentation describes the syntax"),
    "choice": _Kind("list of choices", "use one or more texts"),
}


class ConstraintCompiler:
    """Compiles constraints for one target. Can be called from any thread.

    Args:
        vocabulary: The vocabulary of the target.
        vocab_size: Number of logits of the target.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._compiled: dict[Constraint, LLMatcher] = {}
        self._lock = threading.Lock()

    @cached_property
    def _tokenizer(self) -> ConstraintTokenizer:
        return ConstraintTokenizer(self._vocabulary, self._vocab_size)

    def check(self, constraint: Constraint) -> None:
        """Raise OptionError if a constraint is invalid or no text satisfies it. See `processor`."""
        with self._lock:
            self._matcher(constraint)

    def processor(
        self, constraint: Constraint, prompt: Sequence[int], reply_start: str = ""
    ) -> ConstraintProcessor:
        """Return the logits processor that makes one reply satisfy a constraint.

        The constraint applies to the answer only, and not to the reasoning before it.

        Args:
            constraint: The constraint.
            prompt: Tokens of the prompt. Its end shows whether the model can still decide to reason.
            reply_start: Text at the end of the prompt that belongs to the reply.

        Raises:
            CapabilityError: No token of the vocabulary ends a reply.
            OptionError: The constraint is invalid, no text satisfies it, or `reply_start` violates it.
        """
        with self._lock:
            matcher, tokenizer = self._matcher(constraint).deep_copy(), self._tokenizer
            answer_tokens = tokenizer.unpacked(matcher.compute_bitmask())
            start = AnswerStart(tokenizer, self._vocabulary, prompt, reply_start, answer_tokens)
            given = tokenizer.for_llguidance.tokenize_str(start.text)
        if matcher.try_consume_tokens(given) < len(given):
            raise OptionError(
                f"the reply starts with {_shortened(start.text)!r}, which violates the {constraint.option}",
                "continue the reply without it, or ask for a new reply",
            )
        return ConstraintProcessor(tokenizer, matcher, start)

    def _matcher(self, constraint: Constraint) -> LLMatcher:
        matcher = self._compiled.pop(constraint, None) or self._compile(constraint)
        self._compiled[constraint] = matcher
        if len(self._compiled) > _MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        return matcher

    def _compile(self, constraint: Constraint) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        # Write JSON on one line, as Python's `json.dumps` does. With more whitespace, a model could write
        # whitespace forever.
        style: JsonCompileOptions = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        }
        grammars: dict[str, Callable[[str], str]] = {
            "schema": lambda text: LLMatcher.grammar_from_json_schema(text, overrides=style),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
            "choice": LLMatcher.grammar_from_lark,
        }
        text = _choices(constraint.value) if constraint.option == "choice" else constraint.value
        if len(text) > _MAX_CHARACTERS:
            name = _KINDS[constraint.option].name
            raise OptionError(
                f"the {name} has {len(text):,} characters, more than the limit of {_MAX_CHARACTERS:,}",
                "use a shorter one",
            )
        tokenizer = self._tokenizer.for_llguidance
        try:
            grammar = grammars[constraint.option](text)
            limits = LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
            matcher.compute_bitmask()
            message = matcher.get_error()
        except ValueError as error:
            message = str(error)
        if message:
            raise _refused(constraint.option, text, message)
        return matcher


def _choices(texts: Sequence[str]) -> str:
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _refused(option: str, text: str, message: str) -> OptionError:
    """Convert llguidance's error message about a constraint to an OptionError."""
    kind, message = _KINDS[option], message.replace("<non-verbose/>", "").strip()
    if option == "grammar" and _GBNF_RULE.search(text):
        return OptionError(
            "this looks like llama.cpp's GBNF, but edgespec needs a grammar in Lark's format",
            'write rules with a colon, such as start: "yes" | "no"',
        )
    if option == "regex" and (error := _REGEX_ERROR.search(message)):
        return OptionError(f"invalid regular expression {_shortened(text)!r}: {error[1]}", kind.hint)
    if keywords := _UNSUPPORTED_KEYWORDS.fullmatch(message):
        verb = "are" if "," in keywords[1] else "is"
        names = _shortened(keywords[1].replace('"', ""))
        return OptionError(f"the {kind.name} cannot be used: {names} {verb} not supported", kind.hint)
    reason = "no text satisfies it" if message == "NoExtensionBias" else _shortened(message)
    return OptionError(f"the {kind.name} cannot be used: {reason}", kind.hint)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."
