"""Split a reply into reasoning, answer and tool calls."""

from __future__ import annotations

from typing import NamedTuple

from edgespec.chat.reasoning import ReasoningSplitter, SplitText
from edgespec.chat.tool_calls.calls import ToolCall, ToolCallDelta, collect_calls
from edgespec.chat.tool_calls.parser import CallSyntax

__all__ = ["ReplyParts", "ReplySplitter", "SplitReply", "split_reply"]


class ReplyParts(NamedTuple):
    """Newly generated text, split into reasoning, answer and parts of tool calls.

    Attributes:
        in_reasoning: Whether any of the new text belongs to the reasoning.
    """

    reasoning: str
    answer: str
    in_reasoning: bool
    calls: tuple[ToolCallDelta, ...]


class ReplySplitter:
    """Splits a reply as its text arrives. Tool calls are recognised in the answer, but not in the reasoning.

    Args:
        reply_start: Text at the end of the prompt that already belongs to the reply.
        syntax: The model's tool-call format. None if there are no tools.
    """

    def __init__(self, reply_start: str = "", syntax: CallSyntax | None = None) -> None:
        ends = syntax.form.reasoning_ends if syntax else ()
        self._reasoning = ReasoningSplitter(reply_start, ends)
        self._calls = syntax.parser() if syntax else None
        self._single = syntax is not None and syntax.single
        self._has_second_call = False

    @property
    def pending(self) -> int:
        """Number of characters that are held back and may turn out to be part of the answer."""
        return self._reasoning.pending or (self._calls.pending if self._calls else 0)

    @property
    def after_single_call(self) -> int | None:
        """Number of characters after the only call that the reply may contain. None until it is complete."""
        if not self._single or self._calls is None:
            return None
        if self._has_second_call:
            return 0
        after = self._calls.after_call
        return None if after is None else after + self._reasoning.pending

    def feed(self, text: str) -> ReplyParts:
        """Add reply text. Return all parts that can be classified by now."""
        return self._parts(self._reasoning.feed(text), is_end=False)

    def finish(self, text: str = "", *, cut: bool = False) -> ReplyParts:
        """Add the last of the reply's text, and return all parts that were held back.

        Args:
            text: The text.
            cut: Whether the reply reached its maximum length. If so, an incomplete marker at its end is
                omitted.
        """
        return self._parts(self._reasoning.finish(text, cut=cut), is_end=True, cut=cut)

    def _parts(self, split: SplitText, is_end: bool, *, cut: bool = False) -> ReplyParts:
        if self._calls is None:
            return ReplyParts(*split, ())
        parsed = self._calls.finish(split.answer, cut=cut) if is_end else self._calls.feed(split.answer)
        calls = parsed.calls
        if self._single:
            # Some models write all their calls as one list.
            calls = tuple(call for call in calls if call.index == 0)
            self._has_second_call = self._has_second_call or len(calls) < len(parsed.calls)
        return ReplyParts(split.reasoning, parsed.text, split.in_reasoning, calls)


class SplitReply(NamedTuple):
    """The parts of a finished reply."""

    reasoning: str
    answer: str
    tool_calls: tuple[ToolCall, ...]


def split_reply(
    text: str, reply_start: str = "", syntax: CallSyntax | None = None, *, cut: bool = False
) -> SplitReply:
    """Split a finished reply. See `ReplySplitter` and `ReplySplitter.finish` for the arguments."""
    parts = ReplySplitter(reply_start, syntax).finish(text, cut=cut)
    return SplitReply(parts.reasoning, parts.answer, collect_calls(parts.calls))
