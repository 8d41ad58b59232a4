"""Text for the chat screen: the welcome box, /show, /memory and error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import EdgespecError, WorkerLostError
from edgespec.options.default_model import is_demo, why_toy
from edgespec.options.methods import methods, sources_text
from edgespec.system.files import format_bytes
from edgespec.tui.numbers import count, parameters_text, percent, rate
from edgespec.tui.settings import (
    ALL_LOAD_SETTINGS,
    LOAD_SETTINGS,
    SCHEMA,
    SETTINGS,
    default_source,
    default_text,
    load_setting_text,
    shown,
)

if TYPE_CHECKING:
    from edgespec import Exactness, MemoryPlan, MemoryUse, MethodReport, ModelFacts, Stats
    from edgespec.api.sharing.base import ChatModel
    from edgespec.chat.saved_chat import ModelReferences, SavedChat, Setting
    from edgespec.store.installed import InstalledModel
    from edgespec.tui.model_choice import ChosenLoadOptions
    from edgespec.tui.open_chat import OpenChat

# Models that a first chat can open with, each with a remark and the kind of model to suggest in its place.
_TOY = ("The demo is a toy model for offline use.", "real")
_FIRST_MODELS = {
    "demo": _TOY,
    "demo-mlx": _TOY,
    "smollm2": ("SmolLM2 is very small and often gets facts wrong.", "larger"),
}
# The load options that name files, and what these files are.
_FILE_KINDS = {
    "head": "head",
    "mmproj": "file for images",
    "adapter": "adapter",
    "corpus": "text to draft from",
}
# Number of models on this machine to name on the first screen, chosen to equal that of `suggest_models`.
_MAX_SUGGESTED = 3
# Load options that change how much memory is planned.
_MEMORY_OPTIONS = frozenset({"context", "draft", "experts", "head", "kv_type", "memory", "mmproj"})
ROUGH_GAIN = 0.1
"""A speed-up whose standard error exceeds this value is shown as approximate. The value was chosen."""

# If no number of tokens could be checked faster than this, with all guesses accepted, guessing cannot help.
# The value was chosen to be that of `edgespec tune`.
_MIN_SPEED_UP = 1.05
# Minimum reply length in tokens for showing a speed-up. This value was chosen because shorter replies have
# too few passes to tell whether drafting saved time.
_MIN_TOKENS = 20
# Replies with a lower speed-up are shown as slower. Factors above this value round to at least 1.0.
_SAME_SPEED = 0.95
_CODE = re.compile(r"`([^`\n]+)`")
# Separates the notices in `ModelFacts.notice`.
_NOTICE_SEPARATOR = " · "
_NO_ADVICE = "none were found from the model's makers, so edgespec's own defaults apply"
_LOAD_NAMES = "|".join(name.replace("_", "-") for name in ALL_LOAD_SETTINGS)
# Matches what only a command line can do: commands, which texts put in backticks, and options.
_COMMAND_LINE = re.compile(
    r"`edgespec (?P<command>[^`\n]+)`"
    rf"|omit `?--(?P<omitted>{_LOAD_NAMES})(?![\w-])`?"
    r"|(?<![\w-])--(?P<option>[a-z]+(?:-[a-z]+)*)"
)
_AFTER_LOSS = (
    "To load the model again, type /continue or send a message. To use a model on this machine instead,"
    " type /model."
)
# Why replies can differ from those without the speed-up, keyed by `Exactness.cause`.
_DIFFERENCES = {
    "exactness": "by rounding, because exactness is off",
    "workers": "by rounding, because edgespec does not test this with workers",
    "parallel": "by rounding, because replies are computed together; /set exactness bits runs them one after"
    " the other",
    "acceptance": "because acceptance rejection can choose other tokens (with the same probabilities)",
}
# Minimum loss of speed, as a fraction, for the chat to mention the cost of bit-identical replies.
_NOTICEABLE_LOSS = 0.01


def facts_line(facts: ModelFacts) -> str:
    """Return a model's name, number of parameters, quantisation and file size on one line."""
    file_size = format_bytes(facts.file_bytes)
    return " · ".join(
        filter(None, (facts.name, parameters_text(facts.parameters), facts.quantisation, file_size))
    )


def drafter_names(runtime: ChatModel) -> list[tuple[str, str]]:
    """Return the label and name of the loaded draft model, if there is one, and of each loaded head."""
    return labelled_drafters(runtime.draft.name if runtime.draft is not None else None, _head_names(runtime))


def _head_names(runtime: ChatModel) -> list[str]:
    # A path is too long for the screen, so show only the name of the file or folder.
    return [Path(head.path).name if head.name == head.path else head.name for head in runtime.heads]


def labelled_drafters(draft: str | None, heads: Iterable[str]) -> list[tuple[str, str]]:
    """Return the label and name of the draft model, if there is one, and of each head."""
    return ([("Draft model", draft)] if draft else []) + [("Head", head) for head in heads]


def loaded_value(name: str, runtime: ChatModel, changed: Mapping[str, Any]) -> str:
    """Return the loaded model's value of a load option (see `ALL_LOAD_SETTINGS`) as text.

    Args:
        name: The name of the option.
        runtime: The loaded models.
        changed: The load options that were changed in the chat.
    """
    plan = runtime.plan
    values = {
        "draft": runtime.draft.name if runtime.draft is not None else "none",
        "exactness": exactness.requested if (exactness := runtime.target.exactness) else "auto",
        "head": ", ".join(_head_names(runtime)) or "none",
        "context": count(runtime.context_tokens),
        "experts": str(plan.experts.layers_in_memory) if plan and plan.experts else "auto",
        "kv_type": plan.kv_type if plan else "auto",
        "memory": format_bytes(plan.budget.total_bytes) if plan else "available memory",
        "mmproj": "on" if runtime.target.sees_images else "off",
    }
    return values.get(name) or load_setting_text(name, changed) or "not changed in this chat"


def reason_text(method: MethodReport) -> str:
    """Return the reason for using this method, reworded for the chat."""
    return in_chat(method.chat_reason or method.reason)


def is_too_short(stats: Stats | None) -> bool:
    """Return whether a reply has too few tokens to tell whether drafting saved time."""
    return stats is not None and 0 < stats.generated_tokens < _MIN_TOKENS


def speed_up_text(method: MethodReport, stats: Stats | None = None) -> str:
    """Describe drafting to the user: whether it is on, the source of the draft tokens, and the speed-up.

    Args:
        method: The method report of a reply, or of the next one.
        stats: The statistics of that reply, if there was one.
    """
    if is_too_short(stats):
        method = replace(method, gain=None)
    if method.effective == "none":
        slower = f"; trying it made this reply {method.loss_text} slower" if method.loss_text else ""
        return "off" if method.requested == "none" else f"off for now: {reason_text(method)}{slower}"
    mode = "automatic" if method.requested == "auto" else "on"
    factor = "" if method.gain is None else f"{factor_text(1 + method.gain)}, "
    return f"{factor}{mode} (guesses from: {sources_text(method.effective)})"


def factor_text(factor: float) -> str:
    """Return a speed-up in words, such as `1.6x as fast` or `20% slower`."""
    return f"{factor:.1f}x as fast" if factor >= _SAME_SPEED else f"{percent(1 - factor)} slower"


def speed_up_short(method: MethodReport, stats: Stats | None) -> str:
    """Return a summary of the speed-up for the status line, with a number only if one was measured.

    The summary is empty while `auto` drafts no tokens. `/why` explains the reason, which need not be repeated
    under every reply. A rough speed-up (see `ROUGH_GAIN`) counts as measured only if it exceeds two standard
    errors. The speed-up of a very short reply never counts.
    """
    if method.effective == "none":
        return "" if method.requested == "auto" else "speed-up off"
    estimate = None if stats is None else stats.speedup_estimate
    factor = estimate if method.gain is None else 1 + method.gain
    error = method.gain_uncertainty or 0.0
    is_rough = method.gain is None or error > ROUGH_GAIN
    is_unclear = is_too_short(stats) or (is_rough and abs(method.gain or 1.0) <= 2 * error)
    # At the start of a reply, `gain` still describes earlier text, so do not show it next to "accepted 0%".
    if factor is None or is_unclear or (factor > 1 and stats is not None and stats.acceptance_rate == 0.0):
        return "speed-up on"
    about = "about " if is_rough else ""
    return f"speed-up {about}{factor:.1f}x" if factor >= _SAME_SPEED else f"{about}{factor_text(factor)}"


def exactness_for(runtime: ChatModel, settings: Mapping[str, Setting]) -> Exactness | None:
    """Return whether replies in a chat with these settings exactly match plain decoding."""
    acceptance, temperature = settings.get("acceptance"), settings.get("temperature")
    return runtime.exactness_for(
        acceptance=None if acceptance is None else str(acceptance),
        temperature=None if temperature is None else float(str(temperature)),
    )


def exactness_sentence(exactness: Exactness) -> str:
    """Return a sentence on whether replies match plain decoding and what switching would cost or gain."""
    return sentences(f"replies {'are ' if exactness.bits else ''}{exactness_text(exactness)}")


def exactness_text(exactness: Exactness) -> str:
    """Return `exactness_sentence` without its first words, for display next to the label “replies”."""
    speed = exactness.expected_speed
    if not exactness.bits:
        if exactness.cause:
            return f"can differ from those without the speed-up {_DIFFERENCES[exactness.cause]}"
        cost = f", which takes about {percent(1 / speed - 1)} more time" if speed and speed < 1 else ""
        return (
            "can differ slightly from those without the speed-up because of rounding; to prevent this, use"
            f" /set exactness bits{cost}"
        )
    if not limits_speed(exactness):
        return "identical with and without the speed-up"
    gain = f"makes them up to {percent(1 / speed - 1)} faster" if speed and speed < 1 else "allows guessing"
    return f"identical with and without the speed-up; /set exactness off {gain}, but can change them"


def rounding_warning(runtime: ChatModel) -> str:
    """Return a warning if replies can differ from plain decoding, unless the user chose that."""
    exactness = runtime.target.exactness
    if exactness is None or exactness.bits or exactness.requested == "off":
        return ""
    return exactness_sentence(exactness)


def limits_speed(exactness: Exactness) -> bool:
    """Return whether replies are identical to plain decoding, and would be faster if they could differ."""
    is_slower = (exactness.expected_speed or 1.0) <= 1 - _NOTICEABLE_LOSS
    return exactness.bits and (is_slower or exactness.widths == (1,))


def welcome_line(runtime: ChatModel) -> str:
    """Return the first line of a chat: the model, its context and the source of the speed-up."""
    method = runtime.method
    in_use = method.effective.split("+")
    with_model = [each.name for each in methods() if each.runs_model and each.name in in_use]
    if method.requested == "none":
        speed_up = "off"
    elif why_no_speed_up(runtime):
        speed_up = "none on this machine, /why"
    elif not with_model:
        speed_up = "repeated text only, /why"
    else:
        names = (f"{label.lower()} {name}" for label, name in drafter_names(runtime))
        speed_up = " + ".join(names) or sources_text("+".join(with_model))
    context = f"context {count(runtime.context_tokens, 'token')}"
    return f"{runtime.target.name} · {context} · speed-up: {speed_up}"


def why_no_speed_up(runtime: ChatModel) -> str:
    """Return why guessing cannot make a model faster on this machine, or an empty string if it can."""
    method, costs = runtime.method, runtime.pass_costs
    if method.requested == "none":
        return ""
    if method.effective == "none":
        return reason_text(method)
    if costs and all(width / cost < _MIN_SPEED_UP for width, cost in costs.items()):
        return "checking several guesses at once takes as long as writing the words one by one"
    return ""


def drafting_explanation(runtime: ChatModel) -> str:
    """Explain drafting to a new user in at most three lines of 74 characters. Empty if nothing is drafted."""
    method, exactness = runtime.method, runtime.target.exactness
    if method.effective == "none" or why_no_speed_up(runtime):
        return ""
    guesser = "edgespec"
    if "model" in method.effective.split("+"):
        guesser = "A small draft model"
    elif runtime.heads:
        guesser = "A small draft head"
    outcome = "stay the same" if exactness is None or exactness.bits else "change only by rounding"
    return (
        f"{guesser} guesses the next words, and the model checks several at once, which is faster."
        f" Wrong guesses are discarded, so replies {outcome}. /why explains the speed."
    )


def was_cpu_busy(stats: Stats) -> bool:
    """Return whether other programs' CPU use slowed down most of a reply."""
    return stats.busy_passes > stats.target_passes / 2


def notices(runtime: ChatModel, open_list: str = "Press F9") -> list[str]:
    """Return notices about the loaded models or, for a tiny model, a suggestion of larger ones that fit.

    Args:
        runtime: The loaded models.
        open_list: How the user opens the list of models.
    """
    from edgespec.store.catalogue import load_catalogue

    shared = list(filter(None, [sharing_note(runtime)]))
    loaded = (facts for facts in (runtime.target, runtime.draft) if facts is not None)
    texts = [text for facts in loaded for text in _notices(facts)]
    if larger := _larger_models(runtime, open_list):
        # Show this suggestion instead of the note in the model's catalogue entry.
        found = load_catalogue().find(runtime.target.name)
        others = [text for text in texts if found is None or text != found[0].notice]
        return [*shared, *larger, *map(sentences, others), *filter(None, [rounding_warning(runtime)])]
    return [*shared, *map(sentences, dict.fromkeys(texts)), *filter(None, [rounding_warning(runtime)])]


def _notices(facts: ModelFacts) -> list[str]:
    """Return the notices about a model, without the one about rounding (see `rounding_warning`)."""
    rounding = facts.exactness.reason if facts.exactness is not None else ""
    return [text for text in facts.notice.split(_NOTICE_SEPARATOR) if text not in ("", rounding)]


def switched_note(
    before: ModelFacts,
    runtime: ChatModel,
    options_before: Mapping[str, Any],
    options: ChosenLoadOptions,
) -> str:
    """Return a note about a new model or changed load options, followed by the model's new notices.

    Args:
        before: The model that was loaded before.
        runtime: The loaded models.
        options_before: The load options that the user had changed in the chat before.
        options: The load options of the loaded model.
    """
    target, values = runtime.target, []
    is_same = options.changed is not None and target.path == before.path
    if is_same:
        changed = options.all
        names = [name for name in ALL_LOAD_SETTINGS if changed.get(name) != options_before.get(name)]
        values = [f"{name} is now {loaded_value(name, runtime, changed)}" for name in names]
        if runtime.plan is not None and _MEMORY_OPTIONS.intersection(names):
            values.append(_planned(runtime.plan))
        loaded = changed.get("methods", ())
        if loaded and loaded != options_before.get("methods"):
            values.append(f"the method {' and '.join(loaded)} is loaded")
    if not values:
        values = ["The model was loaded again" if is_same else f"This chat now uses {target.name}"]
    if dropped := options.dropped:
        values.append(f"for this model, {' and '.join(dropped)} went back to the default")
    new = [text for text in _notices(target) if text not in _notices(before)]
    return sentences(*values, *new)


def _planned(plan: MemoryPlan) -> str:
    pools = (
        f"up to {format_bytes(plan.planned_bytes(pool))} of {format_bytes(plan.budget_bytes(pool))}"
        + (" on the GPU" if pool == "gpu" else "")
        for pool in plan.pools
    )
    return f"planned memory: {' and '.join(pools)}"


def still_used_note(name: str, loaded: ModelReferences, own: ModelReferences) -> str:
    """Return a note on which model a chat uses after another one could not be loaded.

    Args:
        name: The name of the loaded model.
        loaded: The references to the loaded models.
        own: The references to the models of the chat. A chat without replies has none.
    """
    if own.target in ("", loaded.target):
        return f"This chat still uses {name}."
    return (
        f"For now, this chat uses {name}. If you send a message, the chat keeps using it. Otherwise, it opens"
        f" with {own.target} the next time."
    )


def sharing_note(runtime: ChatModel) -> str:
    """Return a note naming the program that shares its model with the chat. Empty if there is none."""
    from edgespec.api.sharing.client import host_of

    host = host_of(runtime)
    return f"This chat shares the model that {host} has loaded." if host else ""


def takeover_note(before: ChatModel) -> str:
    """Return a note if the chat reloaded a model that another program had shared, or an empty string."""
    from edgespec.api.sharing.client import host_of

    host = host_of(before)
    return (
        f"The program that had loaded the model, {host}, has exited, so this chat has loaded the model"
        " itself."
        if host
        else ""
    )


def _larger_models(runtime: ChatModel, open_list: str) -> list[str]:
    """Return a notice that suggests larger models to users of a default model.

    Models on this machine come first: downloads are suggested only if there are none.
    """
    from edgespec.loading.speed_prediction import predict_entry
    from edgespec.store.catalogue import load_catalogue, suggest_models
    from edgespec.store.installed import find_installed

    plan, name = runtime.memory().plan, runtime.target.name
    if plan is None or name not in _FIRST_MODELS:
        return []
    if _FIRST_MODELS[name] is _TOY and not is_demo(runtime.target.path):
        return []
    budget_bytes, here = plan.budget_bytes("memory"), find_installed().models
    about, larger = _FIRST_MODELS[name]
    if fitting := _largest_that_fit(here, runtime.target.parameters, budget_bytes):
        return [f"{about} {open_list} to choose a {larger} model. On this machine: {', '.join(fitting)}."]
    names = {model.entry.name for model in here if model.entry}
    models = suggest_models(budget_bytes, "mlx" if name == "demo-mlx" else "gguf", installed=names)
    if not models:
        return []
    named = []
    for each in models:
        found = load_catalogue().find(each.target)
        speed = predict_entry(found[0]) if found else None
        is_known = speed is not None and not speed.is_disturbed
        speed_text = f", about {rate(speed.fastest_tokens_per_second)}" if speed and is_known else ""
        named.append(f"{each.target} ({format_bytes(each.download_bytes)}{speed_text})")
    if why_toy(name):
        about += " SmolLM2, a small real model, is not installed; scripts/setup installs it."
    advice = f"{about} {open_list} to choose and download a {larger} model."
    sizes = " (sizes include draft models)" if any(each.draft for each in models) else ""
    return [f"{advice} These fit this machine{sizes}: {', '.join(named)}."]


def _largest_that_fit(models: Iterable[InstalledModel], min_parameters: int, budget_bytes: int) -> list[str]:
    """Return the names and sizes of the largest models that fit in memory, smallest first.

    Args:
        models: The models to choose from.
        min_parameters: Leave out models that have no more parameters than this.
        budget_bytes: Memory that edgespec may use.
    """
    from edgespec.model.registry import format_of
    from edgespec.store.catalogue import needed_bytes
    from edgespec.store.installed import loaded_bytes

    sizes = {
        model.reference: loaded_bytes(model.info, model.entry)
        for model in models
        if model.info.parameters > min_parameters
        and format_of(model.format).runs_here
        and needed_bytes(loaded_bytes(model.info, model.entry), model.info.parameters) <= budget_bytes
    }
    largest = sorted(sizes, key=lambda name: sizes[name])[-_MAX_SUGGESTED:]
    return [f"{name} ({format_bytes(sizes[name])})" for name in largest]


def show_rows(
    runtime: ChatModel, chat: OpenChat, method: MethodReport, stats: Stats | None
) -> list[tuple[str, str]]:
    """Return the rows that /show displays, most useful first: models, speed-up, context and settings.

    Args:
        runtime: The loaded models.
        chat: The open chat, whose settings are listed.
        method: The drafting method of the current or last reply.
        stats: Statistics of that reply, or None if there was none.
    """
    from edgespec.api.sharing.client import host_of

    rows = [("model", facts_line(runtime.target)), ("speed-up", speed_up_text(method, stats))]
    if host := host_of(runtime):
        rows.append(("loaded by", host))
    if method.effective != "none":
        rows.append(("reason", reason_text(method)))
    if runtime.draft is not None:
        rows.append(("draft model", facts_line(runtime.draft)))
    rows += [("head", name) for name in _head_names(runtime)]
    if exactness := exactness_for(runtime, chat.settings):
        rows.append(("replies", exactness_text(exactness)))
    rows += [
        ("context", _context(runtime.context_tokens, runtime.target.context_tokens)),
        ("memory", _memory(runtime)),
    ]
    rows += [(name, shown(chat.settings[name])) for name in (*SETTINGS, SCHEMA) if name in chat.settings]
    if stats is not None and (worst := worst_case(stats, method, runtime.loss_limits)):
        share, why = worst
        rows.append(("at worst", f"the speed-up made the last reply up to {share} slower (allowed: {why})"))
    rows.append(("system prompt", chat.system or "none"))
    if not runtime.recommended_sampling:
        rows.append(("advised settings", _NO_ADVICE))
    rows += [
        (name, f"{default_text(name, runtime, chat.settings)} ({default_source(name, runtime)})")
        for name in SETTINGS
        if name not in chat.settings
    ]
    return [*rows, ("model file", runtime.target.path)]


def worst_case(
    stats: Stats, method: MethodReport, limits: tuple[float, float] | None
) -> tuple[str, str] | None:
    """Return the maximum slowdown that drafting could have caused in a reply, and an explanation.

    Args:
        stats: Statistics of the reply.
        method: Drafting method of the reply.
        limits: Maximum slowdown allowed, as in `Runtime.loss_limits`.

    Returns:
        A percentage and an explanation, or None while the reply is too short to tell.
    """
    if stats.worst_case_loss is None or method.gain is None or limits is None:
        return None
    rate, steps = limits
    why = f"{percent(rate)} plus the time of {steps:g} tokens"
    return percent(stats.worst_case_loss), why


def _context(max_tokens: int, current_tokens: int) -> str:
    allocated = f"; memory for {count(current_tokens)} so far" if current_tokens < max_tokens else ""
    return f"{count(max_tokens)} tokens{allocated}"


def _memory(runtime: ChatModel) -> str:
    """Return the memory in use and, if there is a memory plan, the planned maximum.

    Both name the cached chats, which the plan does not count, because they are dropped when memory is low.
    """
    cached_bytes, plan = runtime.memory().prefix_cache.memory_bytes, runtime.plan
    used = f"{format_bytes(runtime.memory_bytes())} in use"
    if cached_bytes:
        used += f", of which {format_bytes(cached_bytes)} for cached chats"
    if plan is None:
        return used
    planned = [f"up to {format_bytes(plan.planned_bytes('memory'))}"]
    if plan.prefix_cache_bytes:
        planned.append(f"up to {format_bytes(plan.prefix_cache_bytes)} more for cached chats")
    if "gpu" in plan.pools:
        planned.append(f"up to {format_bytes(plan.planned_bytes('gpu'))} on the GPU")
    return f"{used}; planned: {', '.join(planned)}"


def memory_rows(use: MemoryUse) -> list[tuple[str, str]]:
    """Return the labels and values that the /memory command displays, such as the size of the KV cache."""
    cache = use.prefix_cache
    rows = [
        ("model weights", format_bytes(use.weight_bytes)),
        ("KV cache", f"{format_bytes(use.kv_bytes)} for the context"),
        ("whole program", format_bytes(use.resident_bytes)),
    ]
    if use.context_tokens:
        rows.append(("context", _context(use.max_context_tokens, use.context_tokens)))
    if use.available_bytes:
        rows.append(("free", f"{format_bytes(use.available_bytes)} on this machine"))
    if use.last_reclaim:
        freed = format_bytes(use.reclaimed_bytes)
        rows.append(("freed", f"{freed} so far, for other programs; last: {use.last_reclaim}"))
    rows += _plan_rows(use.plan)
    used, limit = format_bytes(cache.memory_bytes), format_bytes(cache.memory_limit_bytes)
    rows.append(("cached chats", f"{count(cache.sequences, 'prompt')}, {used} of at most {limit}"))
    if cache.disk_limit_bytes:
        used, limit = format_bytes(cache.disk_bytes), format_bytes(cache.disk_limit_bytes)
        rows.append(("cached on disk", f"{used} for this model, at most {limit} for all models"))
    hits, tokens = count(cache.hits), count(cache.reused_tokens, "token")
    rows.append(("cache hits", f"{hits} ({tokens} reused)" if cache.hits else "none yet"))
    return [*rows, ("problem", cache.notice)] if cache.notice else rows


def _plan_rows(plan: MemoryPlan | None) -> list[tuple[str, str]]:
    if plan is None:
        return []
    rows = [
        (
            "planned" if pool == "memory" else "planned on the GPU",
            f"up to {format_bytes(plan.planned_bytes(pool))}"
            + (
                f" of {format_bytes(plan.budget_bytes(pool))}"
                if pool != "memory"
                else ", without cached chats"
            ),
        )
        for pool in plan.pools
    ]
    source = plan.budget.source
    limit = in_chat(source.replace("--memory", "the limit that you have set"))
    if source.startswith("--memory"):
        limit += "; to change it, type /set memory and a size"
    rows.append(("memory limit", f"{format_bytes(plan.budget.bytes)}: {limit}"))
    rows += [
        (
            f"on {share.name}",
            f"{share.layers_text} {'layer' if share.layers == 1 else 'layers'}"
            + (" and the output layer, " if share.has_output else ", ")
            + format_bytes(share.total_bytes),
        )
        for share in plan.machines[1:]
    ]
    return [*rows, *(("to save memory", f"{each.what}: {each.why}") for each in plan.decisions)]


def missing_models_text(saved: SavedChat, target: str, here: ModelReferences | None) -> str:
    """Return a note on the models of a saved chat that are not used, or an empty string if there are none.

    Args:
        saved: The chat.
        target: The name of the model that the chat now uses.
        here: The references to the chat's models that are on this machine, or None if its target is not.
    """
    if here is None and saved.target and saved.target != target:
        switch = f"/model {saved.models.target}".rstrip()
        return f"This chat used {saved.target}, and now uses {target}. Type {switch} to switch."
    return "" if here is None else missing_files_text(saved.models, here)


def missing_files_text(wanted: ModelReferences, here: ModelReferences) -> str:
    """Return a note on the draft model and the files that are missing, or an empty string if none are.

    Args:
        wanted: The references to the chat's models, with the load options that the user has changed.
        here: Those that are on this machine. See `models_here`.
    """
    texts = []
    if here.draft != wanted.draft:
        texts.append(
            f"The draft model {wanted.draft} was not found, so edgespec has chosen one itself. To choose"
            " another, type /draft and its name."
        )
    for name, value in wanted.options.items():
        if name in here.options:
            continue
        file = ", ".join(value) if isinstance(value, list) else value
        texts.append(
            f"The {_FILE_KINDS[name]} {file} was not found, so it is not used. To choose another, type /set"
            f" {name} and its path."
        )
    return " ".join(texts)


def not_found_text(wanted: str) -> str:
    """Return a note that the chat to resume was not found. `wanted` is its ID, its title or `last`."""
    missing = "There are no saved chats yet" if wanted == "last" else f"There is no saved chat {wanted!r}"
    return f"{missing}, so this is a new chat"


def sentences(*texts: str) -> str:
    """Join texts, such as the parts of an error message, into sentences.

    Names of settings, files and models at the start of a sentence are not capitalised. Command line options
    are replaced by the commands that change them in the chat. See `in_chat`.
    """
    texts = tuple(map(_with_commands, texts))
    starts = [text[0].upper() + text[1:] if _starts_with_word(text) else text for text in texts if text]
    return _CODE.sub(r"\1", " ".join(text if text[-1] in ".?!" else f"{text}." for text in starts))


def in_chat(text: str) -> str:
    """Replace command line options and commands in `text` with the chat's slash commands.

    The chat shows these texts without formatting, so the backticks around code are removed.
    """
    return _CODE.sub(r"\1", _with_commands(text))


def _with_commands(text: str) -> str:
    return _COMMAND_LINE.sub(_in_chat, text)


def _in_chat(match: re.Match[str]) -> str:
    """Return what to type in the chat instead of a command or an option."""
    if match["command"]:
        # Commands without a counterpart in the chat work while it is open.
        return _chat_command(match["command"].split()) or f"{match[0]} in another terminal"
    if match["omitted"]:
        return f"type /set {match['omitted']} default"
    return _chat_option(match["option"]) or match[0]


def _chat_command(words: list[str]) -> str:
    """Return the chat's counterpart of an edgespec command, or an empty string if there is none."""
    match words:
        case ["models", "list" | "show"] | ["recommend"]:
            return "/model"
        case ["models", "show", _]:
            return "/set head"
        case ["models", "pull", *name]:
            return f"/model {' '.join(name)}"
        case ["config"]:
            return "/show"
        case ["chat", "--trust"]:
            return "/set trust on"
        case ["serve" | "worker", *_]:
            # These run beside the chat anyway, often on another machine.
            return f"`edgespec {' '.join(words)}`"
        case _:
            return ""


def _chat_option(option: str) -> str:
    """Return the chat's counterpart of a command line option, or an empty string if there is none."""
    name = option.replace("-", "_")
    if name in ("draft", "context", "system"):
        return f"/{name}"
    if name in ("target", "exact"):
        return {"target": "/model", "exact": "/set exactness bits"}[name]
    return f"/set {name}" if name in SETTINGS or name in ALL_LOAD_SETTINGS else ""


def _starts_with_word(text: str) -> bool:
    word = text.split()[0]
    name = word.rstrip(":")
    # The names of the other load options are also ordinary words, such as `workers` and `trust`.
    has_value = word != name or text.startswith(f"{name} is now ")
    if name in SETTINGS or name in LOAD_SETTINGS or (name in ALL_LOAD_SETTINGS and has_value):
        return False
    return word.rstrip(",:").replace("'", "").isalpha()


def error_text(error: Exception) -> tuple[str, str]:
    """Return a title that says what failed, and advice on what to do."""
    if isinstance(error, WorkerLostError):
        return sentences(error.what), sentences(error.next_step, _AFTER_LOSS)
    if isinstance(error, EdgespecError):
        return sentences(error.what), sentences(error.next_step)
    message = " ".join(str(error).split())
    return (
        f"Unexpected error: {type(error).__name__}",
        f"{message}\nYour chat is saved. Try again. If the error persists, please report it.",
    )
