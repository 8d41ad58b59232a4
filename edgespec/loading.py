"""From references to a Runtime: find the files, check the memory, load, compare vocabularies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path

from edgespec.backends.base import LanguageModel, LoadOptions, ModelFacts, Progress
from edgespec.catalog import Resolved, draft_for, recommended_drafts, require_mlx, resolve
from edgespec.checks import flag, number, path_text, text, whole_number
from edgespec.drafters.vocabularies import RetokenisedDrafter, TranslatedModel, compare
from edgespec.drafters.windowed import WindowedModel, window_for
from edgespec.drafting import Branches, Draft, Drafting, outfit
from edgespec.errors import OptionError
from edgespec.memory import available_bytes, parse_size
from edgespec.methods import Drafters, parse_method
from edgespec.prepare.store import check, find
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
    methods: Sequence[str] = (),
    acceptance: str = "invariant",
    adapter: str | PathLike[str] | None = None,
    draft_branches: Branches = (),
    draft_confidence: float = 0.0,
    draft_window: int | None = None,
    draft_sinks: int = 4,
    exit_layer: int | None = None,
    corpus: str | PathLike[str] | None = None,
    remember: bool = False,
    learn: bool = False,
    progress: Progress | None = None,
) -> Runtime:
    """Load a target and its draft.

    target, draft: references (a path, `user/repo:quant`, an alias); draft `auto` takes the recommended one
    if it is on this machine, `none` takes none. memory: the budget for weights and caches, such as
    "8GiB"; by default what is available. context: tokens of prompt and reply together. adapter: a folder
    with a LoRA or DoRA adapter for an MLX target, as mlx-lm writes them. methods: those that replies may ask
    for besides `method`; what they need is loaded as well. draft_branches to learn: see `Drafting`.
    progress: called with (what, fraction), False cancels.

    Raises EdgespecError with the reason and the next step.
    """
    text("target", target, "a path, user/repo:quant or a name such as demo")
    if draft is not None:
        text("draft", draft, "auto, none, a path, user/repo:quant or a name")
    text("kv_type", kv_type, "auto, f16, q8_0 or another type")
    text("flash_attention", flash_attention, "auto, on or off")
    for name, value in (("mmap", mmap), ("mlock", mlock), ("remember", remember), ("learn", learn)):
        flag(name, value)
    if gpu_layers is not None:
        whole_number("gpu_layers", gpu_layers, 0, _NO_LIMIT)
    number("draft_confidence", draft_confidence, "from 0 to below 1")
    whole_number("draft_sinks", draft_sinks, 0, _NO_LIMIT)
    corpus = None if corpus is None else path_text("corpus", corpus)
    adapter = None if adapter is None else path_text("adapter", adapter)
    if progress is not None and not callable(progress):
        raise OptionError(f"progress is {progress!r}", "give a function of a text and a fraction")
    if context is not None:
        whole_number("context", context, 1, _NO_LIMIT)
    if threads is not None:
        whole_number("threads", threads, 1, 1024)
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise OptionError(f"methods is {methods!r}", 'give a list such as ["suffix", "model+ngram"]')
    defaults = Defaults().but(method, draft_length, acceptance)
    named = [parse_method(each) for each in (method, *methods) if each != "auto"]
    asked = frozenset(name for names in named for name in names)
    drafting = asked if "auto" not in (method, *methods) else asked | set(parse_method("auto"))
    for name, drafter, wanted in (
        ("corpus", "suffix", corpus is not None),
        ("exit_layer", "layerskip", exit_layer is not None),
        ("learn", "model", learn),
    ):
        if wanted and drafter not in drafting:
            raise OptionError(
                f"{name} is for the drafter {drafter}, which method {method!r} does not ask for",
                f"leave it out, or add {drafter} to the method",
            )
    how = Drafting(
        asked=asked,
        together=any(len(names) > 1 for names in named),
        branches=_checked_branches(draft_branches),
        confidence=draft_confidence,
        window_tokens=draft_window,
        sink_tokens=draft_sinks,
        exit_layer=exit_layer,
        corpus=corpus,
        remember=remember,
        learn=learn,
    )
    options = LoadOptions(
        context_tokens=context,
        threads=threads,
        gpu_layers=gpu_layers,
        kv_type=kv_type,
        flash_attention=flash_attention,
        mmap=mmap,
        mlock=mlock,
        max_branches=_most_branches(how),
        memory_bytes=parse_size(memory) if memory is not None else available_bytes(),
        adapter=_checked_adapter(adapter),
    )
    found = resolve(target, progress=progress)
    if adapter is not None and found.format != "mlx":
        raise OptionError(
            f"an adapter goes on an MLX model, and {found.name} is a GGUF file",
            "leave --adapter out, or name the model in MLX's form, such as 8b-mlx",
        )
    if found.format == "gguf" and "layerskip" in how.asked:
        found = _prepared_for_exit(found)
    options = replace(options, low_bits=found.format == "mlx" and "lowbit" in how.asked)
    found_draft, why_no_draft = _find_draft(found, draft, progress)
    if not found_draft and "model" in how.asked:
        raise OptionError(f"method {method!r} needs a draft model: {why_no_draft}", "give --draft REF")
    with ExitStack() as undo:
        model = _load_model(found, _meant_for(found, found_draft, options), progress)
        undo.callback(model.close)
        paired = None
        if found_draft:
            draft_options = _meant_for(found_draft, found, _for_draft(options, model.facts))
            paired = _Pairing(model, found, found_draft, how, draft_options, progress).made()
            undo.callback(paired.model.close)
        made = outfit(found, model, paired, how, progress)
        drafters = Drafters(
            model,
            paired.model if paired else None,
            branches=made.growth(paired.model) if paired else (),
            min_confidence=draft_confidence,
            why_no_draft=why_no_draft,
            others=made.others,
            curve=made.curve,
        )
        undo.callback(drafters.close)
        for each in methods:
            drafters.choose(each)  # what is missing is said now, not with the first reply
        notices = (found.entry.notice if found.entry else "", model.facts.notice, *made.notices)
        runtime = Runtime(
            model,
            paired.model if paired else None,
            drafters,
            defaults=defaults,
            notice=" · ".join(filter(None, (*notices, paired.notice if paired else ""))),
        )
        undo.pop_all()
        return runtime


def _prepared_for_exit(found: Resolved) -> Resolved:
    """The form of a GGUF model that was prepared for early exit; the model itself where there is none.

    Raises ModelFileError when it is damaged, or the model has changed since.
    """
    prepared = find("layerskip", found.path)
    if prepared is None:
        return found
    check(prepared, found.path)
    return replace(found, path=prepared.folder, note=str(prepared.folder), format="layerskip")


class _Pairing:
    """Loads a draft model for a target, with the window and the vocabulary it needs."""

    def __init__(
        self,
        target: LanguageModel,
        found: Resolved,
        found_draft: Resolved,
        how: Drafting,
        options: LoadOptions,
        progress: Progress | None,
    ) -> None:
        self._target = target
        self._found = found
        self._found_draft = found_draft
        self._how = how
        self._options = options
        self._progress = progress

    def made(self) -> Draft:
        """The draft. Raises VocabularyMismatchError where target and draft have no token in common."""
        context_tokens = self._target.facts.context_tokens
        draft = _load_model(self._found_draft, self._options, self._progress)
        try:
            trained = draft.facts.trained_context_tokens
            window = window_for(context_tokens, trained, self._how.window_tokens, self._how.sink_tokens)
            if window:
                # All of the text was never wanted in its cache: with the window it is a small one.
                draft.close()
                smaller = replace(self._options, context_tokens=window.context_tokens)
                draft = _load_model(self._found_draft, smaller, self._progress)
            vocabulary = self._target.vocabulary
            compared = compare(vocabulary, draft.vocabulary, self._target.facts.name, self._found_draft.name)
            said = compared.explanation
            if window:
                # The text may be longer in other tokens.
                longest = context_tokens * (1 if compared.translation is None else 4)
                draft = WindowedModel(draft, window, longest)
                seen = f"the first {window.sink_tokens} and the last {window.window_tokens} tokens"
                said = " · ".join(filter(None, (said, f"{self._found_draft.name} sees {seen}")))
            if compared.translation is None:
                return Draft(draft, said)
            if compared.way == "translated":
                return Draft(TranslatedModel(draft, vocabulary, compared.translation), said)
            if self._how.branches:
                raise OptionError(
                    f"{self._found_draft.name} has other tokens than {self._found.name} and drafts chains",
                    "leave --draft-branches out",
                )
            drafter = RetokenisedDrafter(
                draft, vocabulary, compared.translation, min_confidence=self._how.confidence
            )
            return Draft(draft, said, drafter)
        except BaseException:
            draft.close()
            raise


def _load_model(found: Resolved, options: LoadOptions, progress: Progress | None) -> LanguageModel:
    """Load with the backend of the model's format, which is imported when it is needed."""
    if found.format == "layerskip":
        from edgespec.backends.llamacpp.layerskip import load_layerskip

        return load_layerskip(str(found.path), found.name, options, progress)
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
    return replace(
        options,
        context_tokens=target.context_tokens,
        memory_bytes=left,
        draft=True,
        adapter=None,
        low_bits=False,
    )


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


def _checked_branches(branches: Branches) -> Branches:
    if isinstance(branches, str):
        if branches != "auto":
            raise OptionError(f"draft_branches is {branches!r}", "give auto, or numbers such as (3, 2)")
        return "auto"
    if not isinstance(branches, tuple | list):
        raise OptionError(f"draft_branches is {branches!r}", "give auto, or numbers such as (3, 2)")
    for count in branches:
        whole_number("draft_branches", count, 1, _MOST_BRANCHES)
    if math.prod(branches) > _MOST_BRANCHES:
        raise OptionError(
            f"draft_branches {tuple(branches)!r} make {math.prod(branches)} branches",
            f"their product may be {_MOST_BRANCHES} at most",
        )
    return tuple(branches)


def _most_branches(how: Drafting) -> int:
    """How many leaves the target's passes must hold."""
    fixed = 1 if isinstance(how.branches, str) else math.prod(how.branches)
    return max(16 if how.branches == "auto" or "lookahead" in how.asked else 8, fixed + 1)
