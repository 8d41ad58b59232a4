"""Commands that show what the chat uses and how fast it is.

`/why` explains the speed of the last reply. Three sentences say how the reply was sped up, what limited the
speed-up, and what to try next. Further sentences say why a draft model that is loaded was not used, and
whether bit-identical replies cost speed or replies can differ from plain decoding. Before the first reply,
`/why` says what speed-up to expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.chat.message import Message
from edgespec.errors import EdgespecError, OptionError
from edgespec.options.default_model import is_demo
from edgespec.options.methods import sources_text
from edgespec.tui.commands.results import (
    Action,
    Command,
    Context,
    RaceProgress,
    Result,
    RunningRace,
    Table,
    Text,
)
from edgespec.tui.numbers import count, percent
from edgespec.tui.settings import default_sampling
from edgespec.tui.texts import (
    ROUGH_GAIN,
    drafter_names,
    exactness_for,
    exactness_sentence,
    factor_text,
    is_too_short,
    limits_speed,
    memory_rows,
    reason_text,
    sentences,
    show_rows,
    why_no_speed_up,
)
from edgespec.tui.worker import start_reply

if TYPE_CHECKING:
    from edgespec import Exactness, MethodReport, Stats
    from edgespec.api.sharing.base import ChatModel, ChatReply
    from edgespec.chat.saved_chat import Setting

# Below this acceptance rate, draft tokens are rejected too often for a large speed-up.
_LOW_ACCEPTANCE = 0.5
# Gain above which `/why` suggests no changes. 0.3 means 1.3 times as fast.
_GOOD_GAIN = 0.3
# Minimum expected speed-up of a draft model for `/why` to suggest it.
_MIN_SPEEDUP = 1.05
_TRY_DRAFT = "Try the draft model {draft}: type /draft {draft}."
_NO_DRAFT = (
    "No draft model for this model is on this machine or in the catalogue. Without one, the speed-up helps"
    " most when a reply repeats text, for example when you ask for changes to an attached file."
)


def show(context: Context) -> Result:
    """Return the models, the speed-up and the settings."""
    return Table(
        "Model and settings", show_rows(context.runtime, context.chat, context.method, context.stats)
    )


def _details(_context: Context) -> Result:
    return Action("details")


def _why(context: Context) -> Result:
    text = why_text(context.runtime, context.method, context.stats, context.chat.settings)
    return Text(text, title="Why this speed")


def why_text(
    runtime: ChatModel, method: MethodReport, stats: Stats | None, settings: Mapping[str, Setting]
) -> str:
    """Return the text of `/why` for the last reply in a chat with these settings."""
    if stats is None:
        chosen = settings.get("method")
        expected = _expected(runtime, method if chosen is None else runtime.method_for(str(chosen)))
        return "\n".join([*expected, *_exactness(exactness_for(runtime, settings))])
    temperature = settings.get("temperature", default_sampling("temperature", runtime))
    lines = why(
        method,
        stats,
        missing_draft=None if runtime.draft is not None or runtime.heads else _available_draft(runtime),
        is_demo=is_demo(runtime.target.path),
        is_random=float(str(temperature)) > 0,
    )
    if method.requested == "auto" and method.effective == "none" and why_no_speed_up(runtime):
        # A draft model would not help either.
        lines[-1] = _who_gains(runtime) or lines[-1]
    lines[2:2] = _why_unused(runtime, method)
    return "\n".join([*lines, *_exactness(exactness_for(runtime, settings))])


def _why_unused(runtime: ChatModel, method: MethodReport) -> list[str]:
    """Return a sentence for each draft model or head that is loaded but was not used, with what it costs."""
    if method.requested != "auto":
        return []
    texts = []
    for each in method.unused:
        if each.name == "model" and runtime.draft is not None:
            name = f"draft model {runtime.draft.name}"
        else:
            name = sources_text(each.name)
        why = f"one guess takes {percent(each.token_cost)} of the time of a word"
        if each.acceptance_rate is not None and each.speed_up is not None:
            why += (
                f", and {percent(each.acceptance_rate)} of its first guesses are right. With it, replies"
                f" would be about {each.speed_up:.2f}x as fast as without guesses"
            )
            if each.speed_up > 1:
                why += ", so it is tried again as soon as the limit on slowdowns allows"
        elif not each.token_cost:
            why = "its speed has not been measured yet"
        texts.append(f"The {name} is loaded, but was not used in this reply: {why}.")
    return texts


def _expected(runtime: ChatModel, method: MethodReport) -> list[str]:
    """Return sentences on the speed-up to expect, and why there may be none, before the first reply.

    Args:
        runtime: The loaded models.
        method: The method report of the next reply.
    """
    from edgespec.loading.recommendation import cost_text

    if method.requested == "none":
        return ["The speed-up is switched off. To switch it on, type /set method auto."]
    cost = (
        sentences(f"on this machine, {cost_text(runtime.pass_costs[2])}") if 2 in runtime.pass_costs else ""
    )
    if reason := why_no_speed_up(runtime):
        texts = [sentences(f"the speed-up cannot help this model on this machine: {reason}"), cost]
        texts += [
            f"The {label.lower()} {name} is loaded, but not used."
            for label, name in drafter_names(runtime)
            if method.requested == "auto"
        ]
        return list(filter(None, [*texts, _who_gains(runtime)]))
    sources = sources_text(method.effective)
    texts = [f"edgespec will guess words, from: {sources}. No reply has been measured yet.", cost]
    if runtime.draft is None and not runtime.heads:
        draft = _available_draft(runtime)
        texts.append(_TRY_DRAFT.format(draft=draft) if draft else _NO_DRAFT)
    return list(filter(None, texts))


def _who_gains(runtime: ChatModel) -> str:
    """Return a sentence naming a model that would be faster, or an empty string if none is known."""
    from edgespec.loading.recommendation import draft_advice

    plan = runtime.memory().plan
    return sentences(*filter(None, [draft_advice(plan.budget_bytes("memory") if plan else None)]))


def _available_draft(runtime: ChatModel) -> str:
    """Return the best draft model for the target in the catalogue or on this machine, or an empty string."""
    from edgespec.store.drafts import draft_options
    from edgespec.store.installed import find_installed
    from edgespec.store.reference import resolve

    path = Path(runtime.target.path)
    try:
        installed = find_installed(include_embedded=True)
        reference = next((model.reference for model in installed.models if model.path == path), None)
        target = resolve(reference or str(path), allow_download=False)
        options = draft_options(target, installed)
    except EdgespecError:
        return ""
    return next((each.reference for each in options if each.speedup >= _MIN_SPEEDUP), "")


def _exactness(exactness: Exactness | None) -> list[str]:
    """Return a note if bit-identical replies cost speed, or if replies can differ from plain decoding."""
    if exactness is None or (exactness.bits and not limits_speed(exactness)):
        return []
    return [exactness_sentence(exactness)]


def why(
    method: MethodReport, stats: Stats, *, missing_draft: str | None, is_demo: bool, is_random: bool
) -> list[str]:
    """Return three sentences: how the reply was sped up, what limited the speed-up, and what to try next.

    Args:
        method: The method report of the reply.
        stats: The statistics of the reply.
        missing_draft: The draft model to suggest, or an empty string if there is none for this model. None if
            a draft model or a head is loaded.
        is_demo: Whether the model is the demo, which is too small for a large speed-up.
        is_random: Whether the temperature is above 0.
    """
    return [
        _result(method, stats),
        _reason(method, stats),
        _advice(method, stats, missing_draft, is_demo, is_random),
    ]


def _result(method: MethodReport, stats: Stats) -> str:
    if method.effective == "none":
        if method.requested == "none":
            return "The speed-up is switched off, so the model wrote this reply one token at a time."
        is_slower = method.loss_text and not is_too_short(stats)
        cost = f", and trying it made this reply {method.loss_text} slower" if is_slower else ""
        return f"Guessing is off for now{cost}."
    used = f"edgespec guessed words, from: {sources_text(method.effective)}"
    if is_too_short(stats):
        return f"{used}. This reply is too short to tell whether that made it faster."
    if method.gain is not None:
        factor, error = 1 + method.gain, max(0.01, method.gain_uncertainty or 0.0)
        if _is_same_speed(method):
            return f"{used}. The effect on the speed was too small to measure ({factor:.2f}x ± {error:.2f})."
        if _is_unclear(method):
            return (
                f"{used}. The speed varied too much to measure the effect ({factor:.2f}x ± {error:.2f}),"
                " perhaps because other programs were busy."
            )
        if method.gain < 0:
            return f"{used}. That made this reply {percent(-method.gain)} slower (± {percent(error)})."
        return f"{used}. That made this reply {factor:.2f}x as fast (± {error:.2f})."
    if stats.speedup_estimate is None:
        return f"{used}. This reply is too short to tell whether that made it faster."
    return f"{used}. That made this reply about {factor_text(stats.speedup_estimate)}."


def _is_unclear(method: MethodReport) -> bool:
    """Return whether the measured gain is within two standard errors of zero."""
    return method.gain is not None and abs(method.gain) <= 2 * max(0.01, method.gain_uncertainty or 0.0)


def _is_same_speed(method: MethodReport) -> bool:
    """Return whether the measured gain is about zero. See `_is_unclear`."""
    return _is_unclear(method) and (method.gain_uncertainty or 0.0) <= ROUGH_GAIN


def _reason(method: MethodReport, stats: Stats) -> str:
    if method.requested == "none":
        return "The method is set to none in this chat or on the command line."
    if method.effective == "none":
        return sentences(f"Reason: {reason_text(method)}")
    if stats.acceptance_rate is None:
        return "edgespec found nothing to guess from in this reply."
    if stats.accepted_tokens == stats.drafted_tokens:
        accepted = f"All {count(stats.drafted_tokens)} guesses were correct"
    else:
        accepted = (
            f"{count(stats.accepted_tokens)} of {count(stats.drafted_tokens)} guesses were accepted"
            f" ({percent(stats.acceptance_rate)})"
        )
    if stats.acceptance_rate < _LOW_ACCEPTANCE:
        return f"Only {accepted}, and rejected guesses cost time."
    if is_too_short(stats) or (_is_unclear(method) and not _is_same_speed(method)):
        return f"{accepted}."
    if _is_same_speed(method):
        return f"{accepted}, but guessing and checking took about as much time as they saved."
    if (method.gain or (stats.speedup_estimate or 1.0) - 1) < 0:
        return f"{accepted}, but guessing and checking took at least as much time as they saved."
    return f"{accepted}. Guessing and checking take time too, which limits the speed-up."


def _advice(
    method: MethodReport, stats: Stats, missing_draft: str | None, is_demo: bool, is_random: bool
) -> str:
    if method.requested == "none":
        return "To switch the speed-up on, type /set method auto."
    if method.requested != "auto" and (stats.speedup_estimate or 1.0) < 1:
        return "To guess only while that saves time, type /set method auto."
    if is_demo:
        return "The demo model is too small for a large speed-up. To choose a real model, type /model."
    if method.gain is not None and method.gain >= _GOOD_GAIN:
        return "There is nothing to change. To compare this reply with one without the speed-up, type /race."
    if missing_draft:
        return _TRY_DRAFT.format(draft=missing_draft)
    if missing_draft == "":
        return _NO_DRAFT
    if is_random and (stats.acceptance_rate or 0.0) < _LOW_ACCEPTANCE:
        return "Try a lower temperature, which makes words easier to guess: type /set temperature 0."
    return "To try another draft model, type /draft, which lists them. To compare the speeds, type /race."


def _race(context: Context) -> Result:
    """Start a race in the model thread. It uses the chat's messages and settings, but changes neither."""
    # Imported lazily to avoid delaying the first screen.
    from edgespec.bench.race import DEFAULT_RACE_TOKENS, Race, run_race

    if context.writing:
        raise OptionError(
            "The reply is not finished yet",
            "Press Esc to stop it, then type /race again",
            code="command_unavailable",
        )
    chat = context.chat
    messages = chat.messages
    if context.argument:
        messages = (*messages, Message("user", context.argument))
    while messages and messages[-1].role != "user":
        messages = messages[:-1]
    if not messages:
        raise OptionError(
            "There is no message to race with yet",
            "Type /race followed by a message",
            code="command_unavailable",
        )
    chosen = str(chat.settings.get("method") or context.runtime.method.requested)
    method = "auto" if chosen == "none" else chosen
    options: dict[str, Any] = {name: value for name, value in chat.settings.items() if name != "method"}
    # Limit the reply length, because long races are slow to run and to draw.
    options["max_tokens"] = min(int(options.get("max_tokens", DEFAULT_RACE_TOKENS)), DEFAULT_RACE_TOKENS)
    progress, system = RaceProgress(), chat.system

    def work(runtime: ChatModel, is_cancelled: Callable[[], bool]) -> Race:
        def start(**each: Any) -> ChatReply:
            return start_reply(runtime, system, messages, **each)

        def report(description: str, fraction: float) -> bool:
            progress.report(description, fraction)
            return not is_cancelled()

        return run_race(start, options, method=method, progress=report)

    race = context.model_thread.submit(work, progress.report)
    return RunningRace(method, messages[-1].content, race, progress)


def _memory(context: Context) -> Result:
    return Table("Memory", memory_rows(context.runtime.memory()))


SHOW = (Command("show", "", "show the model, the speed-up and all settings", show, ("info",)),)
SPEED = (
    Command(
        "details",
        "",
        "show or hide the speed and memory of the last reply",
        _details,
        ("stats",),
        instead="Type /why to see the speed of the last reply, or /memory to see the memory use",
    ),
    # Looking for draft models is slow because it reads other programs' folders.
    Command("why", "", "explain why the last reply was fast or slow", _why, slow="reads"),
    Command("race", "[message]", "compare a reply with and without the speed-up", _race),
    Command("memory", "", "show how much memory is used, and for what", _memory),
)
