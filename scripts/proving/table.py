"""The table of results in docs/exactness.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scripts.proving.configurations import CONFIGURATIONS, GROUPS
from scripts.proving.prompts import KINDS
from scripts.proving.shards import Line, is_wrong

_COUNTS = ("tokens", "drafted_tokens", "accepted_tokens", "replies", "identical", "rounding", "faults")
_HEADER = ("backend", "model", "drafts from", *(name.replace("_tokens", "") for name in _COUNTS))


def is_proved(lines: Sequence[Line]) -> bool:
    """Return whether nothing is wrong, and every method drafted tokens on every backend.

    A method may draft nothing for one of the models, because its class of passes is too narrow.
    """
    drafted: dict[tuple[str, str], int] = {}
    for line in lines:
        key = line["backend"], line["method"]
        drafted[key] = drafted.get(key, 0) + line["drafted_tokens"]
    return all(drafted.values()) and not any(map(is_wrong, lines))


def _without_drafts(lines: Sequence[Line]) -> list[str]:
    """Return the models and methods that drafted nothing, as text."""
    drafted: dict[str, int] = {}
    for line in lines:
        name = f"`{line['method']}` for {line['model']} ({line['backend']})"
        drafted[name] = drafted.get(name, 0) + line["drafted_tokens"]
    return sorted(name for name, tokens in drafted.items() if not tokens)


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table with one row per model and source of drafts, and a row of totals."""
    groups = {method: group for group, methods in GROUPS.items() for method in methods}
    order = dict.fromkeys((each.backend, each.model, group) for each in CONFIGURATIONS for group in GROUPS)
    sums: dict[tuple[str, str, str], list[int]] = {}
    for line in lines:
        key = (line["backend"], line["model"], groups[line["method"]])
        row = sums.setdefault(key, [0] * len(_COUNTS))
        row[:] = [total + line[name] for total, name in zip(row, _COUNTS, strict=True)]
    places = {key: place for place, key in enumerate(order)}
    rows = [
        (*key, *(f"{value:,}" for value in sums[key]))
        for key in sorted(sums, key=lambda key: places.get(key, len(places)))
    ]
    totals = [sum(line[name] for line in lines) for name in _COUNTS]
    rows.append(("all", "", "", *(f"{value:,}" for value in totals)))
    header = [_HEADER, ("---",) * len(_HEADER)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*header, *rows]) + "\n"


def summary(lines: Sequence[Line]) -> str:
    """Return sentences that summarise the temperatures, shapes and prompts of all results."""
    if not lines:
        return "Nothing has been compared yet.\n"
    temperatures = _tokens_by(lines, lambda line: f"temperature {line['temperature']:g}")
    shapes = _tokens_by(lines, lambda line: line["drafts"])
    prompts = {
        (line["backend"], line["model"], line["block"], name): (name.rpartition("-")[0], length)
        for line in lines
        for name, length in line["prompt_tokens"].items()
    }
    kinds: dict[str, int] = {}
    for name, _ in prompts.values():
        kind = name if name in KINDS else "JSON"
        kinds[kind] = kinds.get(kind, 0) + 1
    by_kind = ", ".join(f"{kind} {count:,}" for kind, count in sorted(kinds.items()))
    lengths = [length for _, length in prompts.values()]
    differences = [line["largest_difference"] for line in lines if line["largest_difference"] is not None]
    sentences = [
        f"Tokens by temperature: {temperatures}.",
        f"By shape of the drafts: {shapes}.",
        f"The {len(prompts):,} prompts have {min(lengths):,} to {max(lengths):,} tokens: {by_kind}.",
    ]
    if without := _without_drafts(lines):
        sentences.append(f"These drafted nothing, so they prove nothing: {', '.join(without)}.")
    if differences:
        sentences.append(f"The largest difference by rounding is {max(differences):.3g} logits.")
    return "\n".join(sentences) + "\n"


def _tokens_by(lines: Sequence[Line], key: Callable[[Line], str]) -> str:
    sums: dict[str, int] = {}
    for line in lines:
        sums[key(line)] = sums.get(key(line), 0) + line["tokens"]
    return ", ".join(f"{name} {tokens:,}" for name, tokens in sorted(sums.items()))
