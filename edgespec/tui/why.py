"""The `/why` command: explain the speed of the last reply.

Three sentences say how the reply was sped up, what limited the speed-up, and what to try next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgespec.reply_options import REPLY_OPTIONS
from edgespec.tui.numbers import count, percent
from edgespec.tui.texts import reason_text, sentences, sources_text
from edgespec.tui.widgets.messages import Panel

if TYPE_CHECKING:
    from edgespec import MethodReport, Runtime, Stats
    from edgespec.chat.saved_chat import Setting
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["show_why", "why", "why_text"]

# Below this acceptance rate, guesses are rejected too often for a large speed-up.
_LOW_ACCEPTANCE = 0.5
# Minimum reply length in tokens. Shorter replies have too few passes to show whether guessing saved time.
_MIN_TOKENS = 20
# Gain from which `/why` suggests no changes. 0.3 means 1.3 times as fast.
_GOOD_GAIN = 0.3


async def show_why(screen: ChatScreen, _argument: str) -> None:
    """Show the three sentences about the current or last reply."""
    text = why_text(screen.runtime, screen.method, screen.stats, screen.current_chat.settings)
    await screen.transcript.show_panel(Panel("Why this speed", text))


def why_text(
    runtime: Runtime, method: MethodReport, stats: Stats | None, settings: Mapping[str, Setting]
) -> str:
    """Return the three sentences of `/why` about the last reply in a chat with these settings."""
    if stats is None:
        return (
            "No reply has been generated since this chat was opened or its model was changed. Send a message,"
            " then type /why."
        )
    temperature = settings.get("temperature", REPLY_OPTIONS["temperature"].default)
    return "\n".join(
        why(
            method,
            stats,
            has_drafter=runtime.draft is not None or bool(runtime.heads),
            is_demo=runtime.target.name.startswith("demo"),
            is_random=float(str(temperature)) > 0,
        )
    )


def why(
    method: MethodReport, stats: Stats, *, has_drafter: bool, is_demo: bool, is_random: bool
) -> list[str]:
    """Return three sentences: how the reply was sped up, what limited the speed-up, and what to try next.

    Args:
        method: The method report of the reply.
        stats: The statistics of the reply.
        has_drafter: Whether a draft model or a head is loaded.
        is_demo: Whether the model is the demo, which is too small for a large speed-up.
        is_random: Whether the temperature is above 0.
    """
    return [
        _result(method, stats),
        _reason(method, stats),
        _advice(method, stats, has_drafter, is_demo, is_random),
    ]


def _result(method: MethodReport, stats: Stats) -> str:
    if method.effective == "none":
        if method.requested == "none":
            return "The speed-up is switched off, so the model wrote this reply one token at a time."
        cost = f", and trying it made this reply {method.loss_text} slower" if method.loss_text else ""
        return f"Guessing is off for now{cost}."
    used = f"edgespec guessed tokens with: {sources_text(method.effective)}"
    if method.gain is not None:
        factor, error = 1 + method.gain, max(0.01, method.gain_uncertainty or 0.0)
        measured = f"{factor:.2f}x ± {error:.2f}"
        if _is_same_speed(method):
            return f"{used}. The effect on the speed was too small to measure ({measured})."
        if method.gain < 0:
            return f"{used}. That made this reply slower ({measured})."
        return f"{used}. That made this reply faster ({measured})."
    if stats.generated_tokens < _MIN_TOKENS or stats.speedup_estimate is None:
        return f"{used}. This reply is too short to tell whether that made it faster."
    how = "slower" if stats.speedup_estimate < 1 else "faster"
    return f"{used}. That made this reply {how} (about {stats.speedup_estimate:.1f}x)."


def _is_same_speed(method: MethodReport) -> bool:
    """Return whether the measured gain is within two standard errors of zero."""
    return method.gain is not None and abs(method.gain) <= 2 * max(0.01, method.gain_uncertainty or 0.0)


def _reason(method: MethodReport, stats: Stats) -> str:
    if method.requested == "none":
        return "Nothing was guessed, because this chat or the command line sets the method to none."
    if method.effective == "none":
        return sentences(f"Reason: {reason_text(method)}")
    if stats.acceptance_rate is None:
        return "No text to guess from was found in this reply."
    accepted = (
        f"{count(stats.accepted_tokens)} of {count(stats.drafted_tokens)} guesses were accepted"
        f" ({percent(stats.acceptance_rate)})"
    )
    if stats.acceptance_rate < _LOW_ACCEPTANCE:
        return f"Only {accepted}, and rejected guesses cost time."
    if _is_same_speed(method) or (method.gain or (stats.speedup_estimate or 1.0) - 1) < 0:
        return f"Guessing and checking took at least as much time as they saved: {accepted}."
    return f"Guessing and checking take time too, which limits the speed-up: {accepted}."


def _advice(method: MethodReport, stats: Stats, has_drafter: bool, is_demo: bool, is_random: bool) -> str:
    if method.requested == "none":
        return "To switch the speed-up on, type /set method auto."
    if method.requested != "auto" and (stats.speedup_estimate or 1.0) < 1:
        return "Type /set method auto, which guesses only while that saves time."
    if is_demo:
        return "The demo model is too small for a large speed-up. `edgespec recommend` suggests a real model."
    if method.gain is not None and method.gain >= _GOOD_GAIN:
        return "There is nothing to change. Type /race to compare this reply with plain decoding."
    if not has_drafter:
        return "Try a draft model: `edgespec models show MODEL` names one that fits yours."
    if is_random and (stats.acceptance_rate or 0.0) < _LOW_ACCEPTANCE:
        return "Try a lower temperature, for example /set temperature 0, which makes text easier to guess."
    return "Run `edgespec tune` to find out which draft length and method suit your models best."
