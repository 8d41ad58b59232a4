"""From references to a Runtime: find the files, check the memory, load, compare vocabularies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from edgespec.backends.base import LanguageModel, LoadOptions, ModelFacts, Progress
from edgespec.catalog import Resolved, draft_for, recommended_drafts, require_mlx, resolve
from edgespec.checks import whole_number
from edgespec.errors import OptionError
from edgespec.memory import available_bytes, parse_size
from edgespec.methods import Drafters, check_vocabularies, parse_method
from edgespec.request import Defaults
from edgespec.runtime import Runtime

__all__ = ["load"]

_NO_LIMIT = (1 << 31) - 1
_MOST_BRANCHES = 64


def load(
    target: str = "demo",
    draft: str | None = "auto",
    *,
    memory: str | int | None = None,
    context: int | None = None,
    threads: int | None = None,
    gpu_layers: int | None = None,
    kv_type: str = "auto",
    flash_attention: str = "auto",
    mmap: bool = True,
    mlock: bool = False,
    method: str = "auto",
    draft_length: int | None = None,
    draft_branches: tuple[int, ...] = (),
    draft_confidence: float = 0.0,
    acceptance: str = "invariant",
    adapter: str | None = None,
    progress: Progress | None = None,
) -> Runtime:
    """Load a target and its draft.

    target, draft: references (a path, `user/repo:quant`, an alias); draft `auto` takes the recommended one
    if it is on this machine, `none` takes none. memory: the budget for weights and caches, such as
    "8GiB"; by default what is available. context: tokens of prompt and reply together. draft_branches:
    children of a draft node at each depth, () for a chain. draft_confidence: stop drafting below this
    probability. adapter: a folder with a LoRA or DoRA adapter for an MLX target, as mlx-lm writes them.
    progress: called with (what, fraction), False cancels.

    Raises EdgespecError with the reason and the next step.
    """
    if context is not None:
        whole_number("context", context, 1, _NO_LIMIT)
    if threads is not None:
        whole_number("threads", threads, 1, 1024)
    if not 0.0 <= draft_confidence < 1.0:
        raise OptionError(f"draft_confidence is {draft_confidence!r}", "give a number from 0 to below 1")
    defaults = Defaults().but(method, draft_length, acceptance)
    branches = _checked_branches(draft_branches)
    options = LoadOptions(
        context_tokens=context,
        threads=threads,
        gpu_layers=gpu_layers,
        kv_type=kv_type,
        flash_attention=flash_attention,
        mmap=mmap,
        mlock=mlock,
        max_branches=max(8, math.prod(branches) + 1),
        memory_bytes=parse_size(memory) if memory is not None else available_bytes(),
        adapter=_checked_adapter(adapter),
    )
    found = resolve(target, progress=progress)
    if adapter is not None and found.format != "mlx":
        raise OptionError(
            f"an adapter goes on an MLX model, and {found.name} is a GGUF file",
            "leave --adapter out, or name the model in MLX's form, such as 8b-mlx",
        )
    found_draft, why_no_draft = _find_draft(found, draft, progress)
    if not found_draft and method != "auto" and "model" in parse_method(method):
        raise OptionError(f"method {method!r} needs a draft model: {why_no_draft}", "give --draft REF")
    with ExitStack() as undo:
        model = _load_model(found, _meant_for(found, found_draft, options), progress)
        undo.callback(model.close)
        draft_model = None
        if found_draft:
            draft_options = _for_draft(options, model.facts)
            draft_model = _load_model(found_draft, _meant_for(found_draft, found, draft_options), progress)
            undo.callback(draft_model.close)
            check_vocabularies(model.vocabulary, draft_model.vocabulary, found.name, found_draft.name)
        drafters = Drafters(
            model,
            draft_model,
            branches=branches,
            min_confidence=draft_confidence,
            why_no_draft=why_no_draft,
        )
        runtime = Runtime(
            model,
            draft_model,
            drafters,
            defaults=defaults,
            notice=" · ".join(filter(None, (found.entry.notice if found.entry else "", model.facts.notice))),
        )
        undo.pop_all()
        return runtime


def _load_model(found: Resolved, options: LoadOptions, progress: Progress | None) -> LanguageModel:
    """Load with the backend of the model's format, which is imported when it is needed."""
    if found.format == "mlx":
        require_mlx(found.name)
        from edgespec.backends import mlx

        return mlx.load(str(found.path), found.name, options, progress)
    from edgespec.backends import llamacpp

    return llamacpp.load(str(found.path), found.name, options, progress)


def _find_draft(
    target: Resolved, draft: str | None, progress: Progress | None
) -> tuple[Resolved | None, str]:
    """The draft, or None with the reason."""
    if draft is None or draft == "none":
        return None, "no draft was wanted"
    if draft != "auto":
        return resolve(draft, progress=progress), ""
    found = draft_for(target)
    if found:
        return found, ""
    names = recommended_drafts(target.entry) if target.entry else []
    if names:
        return None, f"the recommended draft is not on this machine: --draft {names[0]} fetches it"
    return None, f"no draft is known for {target.name}: name one with --draft"


def _for_draft(options: LoadOptions, target: ModelFacts) -> LoadOptions:
    """The draft sees the target's whole context and gets what memory the target leaves."""
    left = None
    if options.memory_bytes is not None:
        left = max(0, options.memory_bytes - target.weight_bytes - target.kv_bytes)
    return replace(options, context_tokens=target.context_tokens, memory_bytes=left, draft=True, adapter=None)


def _meant_for(found: Resolved, other: Resolved | None, options: LoadOptions) -> LoadOptions:
    """In a mixed pair, what is said about llama.cpp's way of computing is said to the GGUF half."""
    if found.format != "mlx" or other is None or other.format == "mlx":
        return options
    plain = LoadOptions()
    return replace(
        options,
        threads=plain.threads,
        gpu_layers=plain.gpu_layers,
        flash_attention=plain.flash_attention,
        mmap=plain.mmap,
        mlock=plain.mlock,
        kv_type=plain.kv_type if options.draft else options.kv_type,
    )


def _checked_adapter(adapter: str | None) -> str | None:
    """The adapter's folder, where there is one; the backend knows what has to be in it."""
    if adapter is None:
        return None
    folder = Path(adapter).expanduser()
    if not folder.is_dir():
        raise OptionError(
            f"there is no folder of an adapter at {folder}",
            "give the folder that `mlx_lm.lora --adapter-path` wrote",
        )
    return str(folder)


def _checked_branches(branches: Sequence[int]) -> tuple[int, ...]:
    for count in branches:
        whole_number("draft_branches", count, 1, _MOST_BRANCHES)
    if math.prod(branches) > _MOST_BRANCHES:
        raise OptionError(
            f"draft_branches {tuple(branches)!r} make {math.prod(branches)} branches",
            f"their product may be {_MOST_BRANCHES} at most",
        )
    return tuple(branches)
