"""Load a target and its draft model, and adapt the draft model to the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.errors import ModelFileError, OptionError, about_option
from edgespec.loading.constants import FOREIGN_CONTEXT_TOKENS, TOKEN_RATIO
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pairing import ModelPair, draft_load_options, options_in_pair
from edgespec.methods.base import Drafter
from edgespec.methods.costs.target_costs import settings_key, use_fastest_threads
from edgespec.methods.model.retokenised import RetokenisedDrafter
from edgespec.methods.model.translated import TranslatedModel
from edgespec.methods.model.translation import VocabularyComparison, compare_vocabularies
from edgespec.methods.model.windowed import AttentionWindow, WindowedModel, choose_draft_window
from edgespec.model.base import LanguageModel, LoadOptions, Progress
from edgespec.model.model_facts import ModelFacts
from edgespec.store.reference import Resolved


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A loaded draft model.

    Attributes:
        model: The model. If its vocabulary differs from the target's, it is wrapped to translate tokens.
        notice: User-facing notice about the model.
        drafter: The drafter to use the model with, or None for the default drafter.
    """

    model: LanguageModel
    notice: str = ""
    drafter: Drafter | None = None


def load_target(pair: ModelPair, options: LoadOptions, progress: Progress | None) -> Sequence[LanguageModel]:
    """Load the target. Return one model for each of `options.parallel` concurrent replies.

    Raises the same errors as the backend's `load`.
    """
    with about_option("target", ModelFileError):
        return _load_models(pair.target, options_in_pair(pair.target, pair.draft, options), progress)


def load_draft(
    pair: ModelPair,
    targets: Sequence[LanguageModel],
    drafting: DraftingOptions,
    options: LoadOptions,
    progress: Progress | None,
) -> Sequence[LoadedDraft | None]:
    """Load a draft model for each of `targets`. If the pair has no draft model, return None for each.

    Raises:
        VocabularyMismatchError: The vocabularies have no tokens in common.
        OptionError: An option is not supported for this draft model.
        EdgespecError: Any error raised by the backend's `load`.
    """
    found = pair.draft
    if found is None:
        return [None] * len(targets)
    target = targets[0]
    facts, memory_bytes = target.facts, options.memory_bytes
    context_tokens = facts.max_context_tokens
    if memory_bytes is not None:
        memory_bytes = max(0, memory_bytes - facts.weight_bytes - len(targets) * facts.max_kv_bytes)
    options = draft_load_options(options, drafting, context_tokens, memory_bytes)
    if drafting.draft_kv_type:
        options = replace(options, kv_type=drafting.draft_kv_type)
    options = options_in_pair(found, pair.target, options)

    def window_for(trained_tokens: int) -> AttentionWindow | None:
        sinks = drafting.arguments["draft_sinks"]
        return choose_draft_window(context_tokens, trained_tokens, drafting.window_tokens, sinks)

    def context_for(trained_tokens: int) -> int:
        window = window_for(trained_tokens)
        return window.context_tokens if window else context_tokens

    with about_option("draft", ModelFileError):
        models = _load_models(found, replace(options, choose_context_tokens=context_for), progress)
    try:
        use_fastest_threads(models[0], settings_key(options), progress)
        compared = compare_vocabularies(
            target.vocabulary, models[0].vocabulary, target.facts.name, found.name
        )
        return [
            _adapted_to_target(model, pair, each, drafting, compared, window_for)
            for each, model in zip(targets, models, strict=True)
        ]
    except BaseException:
        for model in models:
            model.close()
        raise


def _adapted_to_target(
    model: LanguageModel,
    pair: ModelPair,
    target: LanguageModel,
    drafting: DraftingOptions,
    compared: VocabularyComparison,
    window_for: Callable[[int], AttentionWindow | None],
) -> LoadedDraft:
    """Adapt a draft model's context size, attention window and vocabulary to the target."""
    assert pair.draft is not None
    name = pair.draft.name
    window = window_for(model.facts.trained_context_tokens)
    initial_tokens, max_tokens = model.facts.context_tokens, model.facts.max_context_tokens
    if window:
        # Allocate the full context now, because the context of a draft model with an attention window cannot
        # grow.
        model.resize(max_tokens)
    elif compared.translation is not None:
        model.resize(max(initial_tokens, min(max_tokens, FOREIGN_CONTEXT_TOKENS)))
    if drafting.arguments["learn"]:
        _check_trainable(pair.draft, model.facts, pair.target, compared.translation is None, window)
    notices = [pair.why_draft, compared.explanation]
    if window:
        ratio = 1 if compared.translation is None else TOKEN_RATIO
        model = WindowedModel(model, window, target.facts.max_context_tokens * ratio)
        notices.append(
            f"{name} has a smaller context than the model, so in long chats it sees only"
            f" {window.description}, and its guesses may be worse"
        )
    notice = " · ".join(filter(None, notices))
    if compared.translation is None:
        return LoadedDraft(model, notice)
    if compared.mapping == "translated":
        return LoadedDraft(TranslatedModel(model, target.vocabulary, compared.translation), notice)
    if drafting.arguments["draft_branches"]:
        raise OptionError(
            f"{name} cannot draft branches, because its vocabulary differs from that of {pair.target.name}",
            "omit --draft-branches",
            option="draft_branches",
            code="option_not_supported",
        )
    min_confidence = drafting.arguments["draft_confidence"]
    drafter = RetokenisedDrafter(
        model, target.vocabulary, compared.translation, min_confidence=min_confidence
    )
    return LoadedDraft(model, notice, drafter)


def _check_trainable(
    found: Resolved,
    draft: ModelFacts,
    target: Resolved,
    same_vocabulary: bool,
    window: AttentionWindow | None,
) -> None:
    if not found.file_format.online_training:
        why, hint = "--learn works only with MLX draft models", "use an MLX draft model"
    elif not draft.capabilities.trainable:
        why = "edgespec cannot train models with its architecture"
        hint = "use a draft model with a different architecture"
    elif not same_vocabulary:
        why = f"its vocabulary differs from that of {target.name}"
        hint = "use a draft model with the same vocabulary"
    elif window:
        why, hint = "it sees only the end of the text", "use --draft-window 0"
    else:
        return
    raise OptionError(
        f"the draft model {found.name} cannot be trained: {why}",
        f"{hint}, or omit --learn",
        option="learn",
        code="option_not_supported",
    )


def _load_models(found: Resolved, options: LoadOptions, progress: Progress | None) -> Sequence[LanguageModel]:
    form, arguments = found.file_format, (str(found.path), found.name, options, progress)
    if options.parallel > 1 and form.load_slots:
        return form.load_slots(*arguments)
    return [form.load(*arguments)]
