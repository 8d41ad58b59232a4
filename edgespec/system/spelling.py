"""Suggest the names that a user may have meant by a misspelt name."""

from __future__ import annotations

from collections.abc import Iterable

FOREIGN_NAMES = {
    "ctx": "context",
    "ctx_size": "context",
    "context_length": "context",
    "draft_max": "draft_length",
    "draft_model": "draft",
    "instructions": "system",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "maxOutputTokens": "max_tokens",
    "model": "target",
    "model_draft": "draft",
    "cpu_moe": "experts",
    "n_cpu_moe": "experts",
    "ncmoe": "experts",
    "n_ctx": "context",
    "gpu_layers_draft": "draft_gpu_layers",
    "n_gpu_layers": "gpu_layers",
    "n_gpu_layers_draft": "draft_gpu_layers",
    "n_predict": "max_tokens",
    "ngl": "gpu_layers",
    "ngld": "draft_gpu_layers",
    "num_ctx": "context",
    "num_gpu": "gpu_layers",
    "num_predict": "max_tokens",
    "random_seed": "seed",
    "repeat_last_n": "penalty_window",
    "repeat_penalty": "repetition_penalty",
    "stops": "stop",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stopSequences": "stop",
    "stopping_strings": "stop",
    "system_instruction": "system",
    "system_prompt": "system",
    "temp": "temperature",
    "typical": "typical_p",
}
"""Option names of other programs and APIs, mapped to edgespec's names."""

REMOVED_NAMES = {
    ".cast": "use a name that ends in .svg for a picture of the race, or record the terminal while it runs",
    "/vi": "Press Ctrl+G in the full-screen chat to write your message in a text editor",
    "swift": "use `layerskip` with a model that was prepared for it, or `suffix` or `ngram`",
}
"""Methods, slash commands and file types of earlier versions, mapped to advice on what to use instead."""

_MAX_NAMES = 4
# Penalties, counted as typing errors, for omitting the end or the start of a name, as in `--temp`.
_END_MISSING = _START_MISSING = 0.5


def nearest(typed: str, names: Iterable[str]) -> list[str]:
    """Return the names most similar to `typed`, at most four.

    A swapped, missing, extra or wrong letter counts as one error, and at most a third of the letters may be
    wrong. `typed` may also be the beginning of a name, or lack its first words. Case, dashes and underscores
    are ignored. Option names of other programs, such as `n_ctx`, are also recognised.

    Args:
        typed: The name that the user typed.
        names: The valid names.

    Returns:
        The names in the order of `names`. Empty if none is similar.
    """
    letters = "".join(_words(typed))
    scores: dict[str, float] = {}
    for name in names:
        words = _words(name)
        foreign = (
            [each.replace("_", "")] for each, meant in FOREIGN_NAMES.items() if meant.split("_") == words
        )
        scores[name] = min(_score(letters, each) for each in (words, *foreign))
    best = min(scores.values(), default=0.0)
    if best > max(_END_MISSING, len(letters) / 3):
        return []
    return [name for name, score in scores.items() if score == best][:_MAX_NAMES]


def _words(name: str) -> list[str]:
    return name.lower().replace("-", "_").strip("_").split("_")


def _score(typed: str, words: list[str]) -> float:
    scores = []
    for first in range(len(words)):
        *beginnings, whole = _errors(typed, "".join(words[first:]))
        errors = min([float(whole), *(each + _END_MISSING for each in beginnings)])
        scores.append(errors + (_START_MISSING if first else 0.0))
    return min(scores)


def _errors(typed: str, name: str) -> list[int]:
    """Return the edit distance between `typed` and each prefix of `name`, starting with the empty one.

    This is the optimal string alignment distance, in which swapping two adjacent letters counts once.
    """
    rows = [list(range(len(name) + 1))]
    for i, letter in enumerate(typed):
        row = [i + 1]
        for j, other in enumerate(name):
            errors = min(rows[i][j] + (letter != other), rows[i][j + 1] + 1, row[j] + 1)
            if i and j and (letter, typed[i - 1]) == (name[j - 1], other):
                errors = min(errors, rows[i - 1][j - 1] + 1)
            row.append(errors)
        rows.append(row)
    return rows[-1]
