"""Compile constraints for a model's vocabulary.

Each new constraint is first compiled in a child process, because some crash llguidance or take
minutes.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from queue import Empty, Full, Queue, SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.chat.tool_calls.grammar import AnswerRule
from edgespec.constraints.matcher import Constraint, as_expression, new_matcher, readable, text_of
from edgespec.constraints.processor import AnswerStart, ConstraintProcessor
from edgespec.constraints.tokenizer import ConstraintTokenizer
from edgespec.errors import CapabilityError, EdgespecError, OptionError, shorten
from edgespec.model.base import Vocabulary
from edgespec.options.schemas.enforceable import enforceable_schema, requires_endless_value, subschemas
from edgespec.system.child_process import ChildProcess, module_arguments

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["ConstraintCompiler", "ConstraintTrial"]

# Maximum length of a constraint, in characters.
_MAX_CHARACTERS = 1 << 18
# Maximum number of characters to quote in an error message.
_MAX_SHOWN_CHARACTERS = 300
# The patterns below match llguidance's error messages, because it reports causes only as text. This pattern
# matches the reason in messages about regular expressions and JSON schemas.
_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_LOOK_AROUND = re.compile(r"lookarounds not supported yet; (Word|Start|End)")
# Descriptions of the look-arounds that llguidance does not support, keyed by llguidance's names.
_LOOKS = {
    "Word": r"a word boundary, such as \b,",
    "Start": r"^ or \A after the start",
    "End": r"$ or \z before the end",
}
_UNSUPPORTED_KEYWORDS = re.compile(r"Unimplemented keys: \[(.+)\]", re.DOTALL)
_UNKNOWN_FORMAT = re.compile("Unknown format: (.+)")
# Matches the beginning of a rule in a llama.cpp grammar.
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# Maximum number and total size in bytes of cached constraints. They are cached because programs often send
# the same schema with every request. The size is limited because a constraint of 10 characters can use 50
# MiB.
_MAX_CACHED = 8
_MAX_CACHED_BYTES = 48 << 20
# Maximum CPU time in seconds for compiling a constraint. A schema of 250,000 characters takes about 1 second.
_TRIAL_CPU_SECONDS = 5.0
# Maximum time in seconds to wait for the child process. This exceeds the CPU time limit, because the process
# may get little CPU time.
_MAX_TRIAL_SECONDS = 30.0
# Seconds to wait for a crashed child process to exit.
_TRIAL_EXIT_SECONDS = 5.0
# Maximum number of constraints to compile concurrently. More than one is allowed, so that a slow constraint
# does not delay all others.
_MAX_TRIALS = 2


class _Kind(NamedTuple):
    name: str
    hint: str


_KINDS = {
    "schema": _Kind("JSON schema", "change or remove this part of the schema"),
    "regex": _Kind("regular expression", "use the syntax of Rust's regex crate, without look-around"),
    "grammar": _Kind("grammar", "correct the grammar; llguidance's documentation describes the syntax"),
    "choice": _Kind("list of choices", "use one or more non-empty strings"),
}


class _Compiled(NamedTuple):
    matcher: LLMatcher
    size_bytes: int


class ConstraintCompiler:
    """Compiles constraints for one target. Thread-safe.

    The most recently used constraints are cached. Replies with a cached constraint do not wait while
    others are being compiled.

    Args:
        vocabulary: The target's vocabulary.
        vocab_size: Number of logits that the target returns per token.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._cache: dict[Constraint, _Compiled] = {}
        # Guards the cached constraints and the creation of the tokenizer.
        self._lock = threading.Lock()

    @cached_property
    def _tokenizer(self) -> ConstraintTokenizer:
        return ConstraintTokenizer(self._vocabulary, self._vocab_size)

    def check(self, constraint: Constraint) -> None:
        """Raise OptionError if a constraint is invalid or no text satisfies it. See `processor`."""
        self._matcher(constraint)

    def answer_rule(self, constraint: Constraint) -> AnswerRule:
        """Convert a constraint to a grammar rule for replies that either satisfy it or call tools.

        Raises OptionError if the constraint is invalid or no text satisfies it.
        """
        self.check(constraint)
        expression = as_expression(constraint.option, _checked_text(constraint))
        return AnswerRule(expression, is_json=constraint.option == "schema")

    def processor(
        self,
        constraint: Constraint,
        prompt: Sequence[int],
        reply_start: str = "",
        *,
        text_may_precede: bool = False,
    ) -> ConstraintProcessor:
        """Create the logits processor that makes a reply satisfy a constraint.

        The constraint applies only to the answer, not to any reasoning before it.

        Args:
            constraint: The constraint to enforce.
            prompt: The prompt's tokens. Its end determines whether the model may still start to reason.
            reply_start: Text at the end of the prompt that belongs to the reply.
            text_may_precede: Whether `reply_start` may violate the constraint, such as text before a tool
                call. If it does, the constraint applies only to what follows.

        Raises:
            CapabilityError: The vocabulary has no token that ends a reply.
            OptionError: The constraint is invalid, no text satisfies it, or `reply_start` violates it.
        """
        matcher = self._matcher(constraint)
        with self._lock:
            tokenizer = self._tokenizer
            answer_tokens = tokenizer.unpacked(matcher.compute_bitmask())
            start = AnswerStart(tokenizer, self._vocabulary, prompt, reply_start, answer_tokens)
            given = tokenizer.for_llguidance.tokenize_str(start.text)
        if matcher.try_consume_tokens(given) < len(given):
            if text_may_precede:
                return ConstraintProcessor(tokenizer, self._matcher(constraint), start)
            # Say "constraint" rather than "grammar", because the user may not have written a grammar:
            # edgespec generates one for replies that can contain either tool calls or an answer.
            name = "constraint" if constraint.option == "grammar" else _KINDS[constraint.option].name
            raise OptionError(
                f"the reply starts with {shorten(start.text, _MAX_SHOWN_CHARACTERS)!r}, which violates the"
                f" {name}",
                f"continue the reply without the {name}, or ask for a new reply",
                code="constraint_violated",
            )
        return ConstraintProcessor(tokenizer, matcher, start)

    def _matcher(self, constraint: Constraint) -> LLMatcher:
        if matcher := self._cached_matcher(constraint):
            return matcher
        text = _checked_text(constraint)
        with _borrowed_trial() as trial:
            # Another thread may have compiled this constraint in the meantime.
            if matcher := self._cached_matcher(constraint):
                return matcher
            compiled = self._compile(constraint.option, text, trial)
            self._add_to_cache(constraint, compiled)
        return compiled.matcher.deep_copy()

    def _cached_matcher(self, constraint: Constraint) -> LLMatcher | None:
        with self._lock:
            compiled = self._cache.pop(constraint, None)
            if compiled is None:
                return None
            self._cache[constraint] = compiled
            return compiled.matcher.deep_copy()

    def _add_to_cache(self, constraint: Constraint, compiled: _Compiled) -> None:
        with self._lock:
            self._cache[constraint] = compiled
            while len(self._cache) > 1 and (
                len(self._cache) > _MAX_CACHED
                or sum(each.size_bytes for each in self._cache.values()) > _MAX_CACHED_BYTES
            ):
                del self._cache[next(iter(self._cache))]

    def _compile(self, option: str, text: str, trial: ConstraintTrial) -> _Compiled:
        result = trial.run(option, text)
        if isinstance(result, str):
            raise OptionError(
                f"the {_KINDS[option].name} cannot be used: {result}",
                f"use a simpler {_KINDS[option].name}",
                code="constraint_not_supported",
            )
        with self._lock:
            tokenizer = self._tokenizer.for_llguidance
        try:
            matcher = new_matcher(option, text, tokenizer)
            message = matcher.get_error()
        except ValueError as error:
            message = str(error)
        if message:
            raise _refused(option, text, message)
        if option == "schema" and _is_endless(text):
            raise OptionError(
                "the JSON schema cannot be used: no finite text satisfies it, because each value must"
                " contain another value of the same kind",
                "make the property that refers to its own schema optional",
                code="constraint_not_supported",
            )
        return _Compiled(matcher, result)


def _checked_text(constraint: Constraint) -> str:
    """Return a constraint in the text form that llguidance expects.

    Raises OptionError if the text is too long, or if llguidance would not enforce it exactly.
    """
    text = text_of(constraint)
    if len(text) > _MAX_CHARACTERS:
        raise OptionError(
            f"the {_KINDS[constraint.option].name} has {len(text):,} characters, more than the limit of"
            f" {_MAX_CHARACTERS:,}",
            f"use a shorter {_KINDS[constraint.option].name}",
            code="constraint_not_supported",
        )
    return _enforceable(text) if constraint.option == "schema" else text


def _enforceable(schema: str) -> str:
    """Return an equivalent JSON schema that llguidance enforces exactly. See `enforceable_schema`."""
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):
        return schema  # llguidance reports the error.
    return json.dumps(enforceable_schema(value))


def _is_endless(schema: str) -> bool:
    # Skip this check for JSON that Python cannot parse, because llguidance reports the error.
    with suppress(ValueError, RecursionError):
        return requires_endless_value(json.loads(schema))
    return False


def _refused(option: str, text: str, message: str) -> OptionError:
    kind, message = _KINDS[option], readable(message)
    if option == "grammar" and _GBNF_RULE.search(text):
        return OptionError(
            "this looks like llama.cpp's GBNF, but edgespec needs a grammar in Lark's format",
            'write rules with a colon, such as start: "yes" | "no"',
            code="constraint_invalid",
        )
    if option == "regex" and (error := _REGEX_ERROR.search(message)):
        return OptionError(
            f"invalid regular expression {shorten(text, _MAX_SHOWN_CHARACTERS)!r}: {error[1]}",
            kind.hint,
            code="constraint_invalid",
        )
    if option == "regex" and (look := _LOOK_AROUND.search(message)):
        return OptionError(
            f"the regular expression {shorten(text, _MAX_SHOWN_CHARACTERS)!r} cannot be used:"
            f" {_LOOKS[look[1]]} is not supported",
            "remove it, because the whole reply must match anyway, or spell out the text that is allowed"
            " there",
            code="constraint_not_supported",
        )
    if keywords := _UNSUPPORTED_KEYWORDS.fullmatch(message):
        verb = "are" if "," in keywords[1] else "is"
        names = shorten(keywords[1].replace('"', ""), _MAX_SHOWN_CHARACTERS)
        place = _place(text, lambda part: all(name in part for name in json.loads(f"[{keywords[1]}]")))
        return OptionError(
            f"the {kind.name} cannot be used: {names} {verb} not supported{place}",
            kind.hint,
            code="constraint_not_supported",
        )
    if unknown := _UNKNOWN_FORMAT.fullmatch(message):
        place = _place(text, lambda part: part.get("format") == unknown[1])
        return OptionError(
            f"the {kind.name} cannot be used: format {unknown[1]} is not supported{place}",
            kind.hint,
            code="constraint_not_supported",
        )
    if option == "schema" and message.startswith("oneOf constraints are not supported"):
        place = _place(text, lambda part: "oneOf" in part)
        return OptionError(
            f"the {kind.name} cannot be used: more than one alternative of oneOf could match{place}",
            "use anyOf, or give the alternatives different values of a required property",
            code="constraint_not_supported",
        )
    reason = "no text satisfies it" if message == "NoExtensionBias" else message
    shown = shorten(reason, _MAX_SHOWN_CHARACTERS)
    return OptionError(f"the {kind.name} cannot be used: {shown}", kind.hint, code="constraint_not_supported")


def _place(schema: str, matches: Callable[[dict[str, Any]], bool]) -> str:
    """Return the first matching subschema's path, formatted for a message, or "" if none matches."""
    places = (place for place, part in subschemas(json.loads(schema)) if matches(part))
    found = next(places, None)
    return f" (in {shorten(found, _MAX_SHOWN_CHARACTERS)})" if found else ""


class ConstraintTrial:
    """A child process that tries to compile constraints. The process starts when it is first needed.

    Not thread-safe. The child process exits when this object is deleted or the parent process exits.
    """

    def __init__(self) -> None:
        self._process: ChildProcess | None = None

    def run(self, option: str, text: str) -> int | str:
        """Compile a constraint in the child process.

        This does not check whether the constraint is valid, which can be done without a child process.

        Args:
            option: Name of the option that sets the constraint: `schema`, `regex`, `grammar` or `choice`.
            text: The constraint as text, from `text_of`.

        Returns:
            The approximate size of the compiled constraint in bytes, or the reason why compiling it failed.

        Raises:
            CapabilityError: The process cannot be started.
        """
        if self._process is None or not self._process.alive:
            self._process = _start()
        process, answers = self._process, SimpleQueue[bytes]()

        def exchange() -> None:
            answer = b""
            with suppress(OSError, ValueError):
                process.stdin.write(json.dumps([option, text, _TRIAL_CPU_SECONDS]).encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            answers.put(answer)

        Thread(target=exchange, name="edgespec-constraint-trial", daemon=True).start()
        try:
            if answer := answers.get(timeout=_MAX_TRIAL_SECONDS):
                return int(answer)
        except Empty:
            process.close()
            return f"processing it takes more than {_MAX_TRIAL_SECONDS:.0f} seconds"
        # The process has closed its output, so it is about to exit. Its exit status indicates the reason.
        process.wait(_TRIAL_EXIT_SECONDS)
        process.close()
        if process.exceeded_cpu_limit:
            return f"processing it takes more than {_TRIAL_CPU_SECONDS:g} seconds"
        return "it is nested too deeply, or needs too much memory"

    def close(self) -> None:
        """Stop the child process."""
        if self._process:
            self._process.close()


_trial_places = BoundedSemaphore(_MAX_TRIALS)
# Holds at most one idle child process, shared by all models, because each process uses about 40 MiB.
_idle_trials: Queue[ConstraintTrial] = Queue(1)


@contextmanager
def _borrowed_trial() -> Iterator[ConstraintTrial]:
    """Yield a trial for exclusive use, waiting for one if all are in use."""
    with _trial_places:
        try:
            trial = _idle_trials.get_nowait()
        except Empty:
            trial = ConstraintTrial()
        try:
            yield trial
        finally:
            try:
                _idle_trials.put_nowait(trial)
            except Full:
                trial.close()


def _start() -> ChildProcess:
    try:
        return ChildProcess(module_arguments("edgespec.constraints.trial_worker"))
    except EdgespecError as error:
        raise CapabilityError(
            f"constraints cannot be used: {error.what}", error.next_step, code=error.code
        ) from error
