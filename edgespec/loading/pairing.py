"""Find a target, its draft model and its heads by reference, and check that they can be loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

from edgespec.errors import CancelledError, EdgespecError, ModelFileError, OptionError, about_option
from edgespec.loading.constants import DRAFT_ROWS
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.model.base import LoadOptions, Progress
from edgespec.model.formats.projector import read_projector
from edgespec.model.memory_estimate import BLOCK_TOKENS
from edgespec.model.model_facts import Adapter
from edgespec.model.registry import Backend, same_backend
from edgespec.model.trial_load import TrialModel, check_loadable
from edgespec.options.methods import head_names, methods
from edgespec.store.drafts import DraftChoice, choose_draft
from edgespec.store.heads import HeadOption, head_options, named_head, resolve_head
from edgespec.store.installed import find_projector, model_info_or_none
from edgespec.store.reference import Resolved, refused_head, resolve
from edgespec.store.remote_header import resolve_head_metadata
from edgespec.system.files import format_bytes

_Result = TypeVar("_Result")
FindModel = Callable[[str], Resolved]


@dataclass(frozen=True, slots=True)
class ModelPair:
    """The files of a target, its draft model and its heads. The draft model and heads are optional.

    Attributes:
        target: The target.
        draft: The draft model, or None.
        why_no_draft: Why there is no draft model, as a clause that mentions the draft model. Empty if there
            is one.
        why_draft: Why `auto` chose this draft model. Empty if the user chose it or the catalogue recommends
            it.
        draft_is_automatic: Whether `auto` chose the draft model. If loading it fails, it is replaced.
        failed_drafts: Notice about draft models that `auto` preferred but could not load. Empty if there are
            none.
        heads: Heads to draft with, at most one per method, most preferred first.
        why_no_head: Why there is no head, or why heads were dropped. Empty otherwise.
        why_heads: Notice for the user that names the chosen heads. Empty if the user chose the head.
        head_advice: How to draft with a head that is used only if the user names it. Empty if there is no
            such head.
    """

    target: Resolved
    draft: Resolved | None
    why_no_draft: str
    why_draft: str = ""
    heads: tuple[HeadOption, ...] = ()
    why_no_head: str = ""
    why_heads: str = ""
    head_advice: str = ""
    draft_is_automatic: bool = False
    failed_drafts: str = ""

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The models' backends, the target's first."""
        return tuple(found.backend for found in (self.target, self.draft) if found)


class _DraftFailedError(Exception):
    """Raised if a draft model that `auto` chose cannot be loaded, so that another one can be tried."""

    def __init__(self, draft: Resolved, error: EdgespecError) -> None:
        super().__init__(error.what)
        self.draft, self.reason = draft, error.what


@contextmanager
def loading_draft(pair: ModelPair) -> Iterator[None]:
    """Mark errors raised in the `with` block as failures of the pair's draft model. See `with_working_draft`.

    Errors about options are raised unchanged, because only the user can resolve them.
    """
    try:
        yield
    except (CancelledError, OptionError):
        raise
    except EdgespecError as error:
        if pair.draft is None or not pair.draft_is_automatic:
            raise
        raise _DraftFailedError(pair.draft, error) from error


def with_working_draft(
    find: Callable[[Mapping[Path, str]], ModelPair], use: Callable[[ModelPair], _Result]
) -> _Result:
    """Return `use(pair)`. If an automatic draft model fails to load, try the next best, and finally none.

    Args:
        find: Finds the pair, given a map from the path of each failed draft model to the reason.
        use: Plans or loads the pair. It must mark draft model failures with `loading_draft`.
    """
    failed: dict[Path, str] = {}
    while True:
        pair = find(failed)
        try:
            return use(pair)
        except _DraftFailedError as error:
            # The planner may have replaced the draft model with a smaller quantisation, so `error.draft` is
            # not necessarily the file to exclude from the next attempt.
            assert pair.draft is not None
            failed[pair.draft.path] = f"not using the draft model {error.draft.name}: {error.reason}"


def find_pair(
    target: str,
    draft: str | None,
    drafting: DraftingOptions,
    progress: Progress | None,
    options: LoadOptions | None = None,
    find_model: FindModel | None = None,
    find_head: FindModel | None = None,
    failed_drafts: Mapping[Path, str] | None = None,
) -> ModelPair:
    """Find the files of a target, its draft model and its heads, downloading those that the user named.

    Uses the files that `edgespec prepare layerskip` created for a GGUF target if a method names `layerskip`,
    or if `auto` has nothing else to draft with.

    Args:
        target: Reference to the target.
        draft: Reference to the draft model. `auto` chooses from the models on this machine, or none if the
            user named a head.
        drafting: The methods that replies can use.
        progress: Called during downloads. Returning False cancels them.
        options: Memory and context limits for `auto` to respect when choosing a draft model.
        find_model: Finds a model by reference. The default downloads missing files.
        find_head: Finds a head by reference. The default downloads missing files, and converts the head to
            the target's format.
        failed_drafts: Draft models that `auto` must not choose because loading them failed, with the reasons.

    Raises:
        OptionError: A method needs a draft model and there is none, or the target does not support adapters.
        CapabilityError: The head that the user named cannot draft for the target.
        ModelFileError: The prepared files are damaged or outdated.
        EdgespecError: Any error raised by `catalog.resolve`.
    """
    find_model = find_model or partial(resolve, progress=progress)
    with about_option("target"):
        found = find_model(target)
    options = with_own_adapters(options or LoadOptions(), found)
    _check_is_model(found)
    with about_option("head"):
        heads = _find_heads(found, drafting, find_head, progress)
    on_workers = drafting.arguments["workers"] is not None
    names_head = any(head.source == "named" for head in heads.chosen)
    if names_head and draft == "auto" and not drafting.needs_draft_model:
        choice = DraftChoice(None, "the draft head is used instead of a draft model")
    else:
        # This machine's memory does not limit a target whose layers are on workers.
        limits = replace(options, memory_bytes=None) if on_workers else options
        choice = _find_draft(found, draft, find_model, limits, failed_drafts or {})
        if choice.draft and choice.source != "automatic":
            _check_is_model(choice.draft)
        if not choice.draft and draft == "auto":
            choice = replace(choice, reason=choice.reason + heads.suggestion)
    found_draft, why_none = choice.draft, "" if choice.draft else choice.reason
    why_draft = ""
    if found_draft and not choice.is_expected:
        why_draft = f"using the draft model {found_draft.name}: {choice.reason}"
    if options.adapters:
        _check_adapters(options.adapters, found, drafting)
    else:
        drafts_otherwise = found_draft is not None or bool(heads.chosen) or on_workers
        found = _prepared_target(found, drafting, drafts_otherwise)
    if heads.chosen and not found.file_format.heads:
        heads = _without_heads(
            heads,
            f"edgespec runs the version of {found.name} that was prepared for early exit, which does not"
            " support draft heads",
        )
    if not found_draft and drafting.needs_draft_model:
        needing = {each.name for each in methods() if each.needs == "draft model"}
        method = next(method for method in drafting.methods if needing & {*method.split("+")})
        raise OptionError(
            f"the method {method!r} needs a draft model: {why_none}",
            "choose a draft model with --draft MODEL",
            option="method",
            code="draft_missing",
        )
    return ModelPair(
        found,
        found_draft,
        why_none,
        why_draft,
        heads.chosen,
        heads.why_none,
        heads.notice,
        heads.advice,
        draft_is_automatic=choice.source == "automatic",
        failed_drafts=" · ".join((failed_drafts or {}).values()),
    )


class _FoundHeads(NamedTuple):
    """The heads for a target.

    Attributes:
        chosen: The heads to draft with.
        why_none: Why no head was chosen. Empty if `chosen` is not empty.
        notice: Message that tells the user which heads were chosen. Empty if there is nothing to report.
        suggestion: Clause that suggests a published head, to append to a message. Empty if there is none.
        advice: How to draft with a head that is used only if the user names it. Empty if there is none.
    """

    chosen: tuple[HeadOption, ...] = ()
    why_none: str = ""
    notice: str = ""
    suggestion: str = ""
    advice: str = ""


def _find_heads(
    target: Resolved,
    drafting: DraftingOptions,
    find_head: FindModel | None,
    progress: Progress | None,
) -> _FoundHeads:
    """Find the heads to draft with: the one that the user named, or those in or next to the target's files.

    Args:
        target: The model to draft for.
        drafting: The methods that replies can use, and the value of `--head`.
        find_head: Resolves a reference to a head. By default, missing heads are downloaded and converted to
            the target's format.
        progress: Called during downloads. Returning False cancels them.

    Raises:
        OptionError: The target's format supports no heads.
        CapabilityError: The head that the user named cannot draft for the target.
        EdgespecError: Any error raised by `resolve_head`.
    """
    if drafting.head == "none":
        return _FoundHeads(why_none="--head none was given")
    if drafting.head != "auto":
        if not target.file_format.heads:
            raise OptionError(
                f"{target.name} does not support draft heads, because it is not a GGUF model",
                "use --head none, or a GGUF version of the model",
                option="head",
                code="option_not_supported",
            )
        if find_head is not None:
            return _FoundHeads((named_head(find_head(drafting.head), target, convert=False),))
        # Check the metadata first, to avoid downloading the weights of a head that was made for a different
        # target.
        with TemporaryDirectory(prefix="edgespec-") as folder:
            header = resolve_head_metadata(drafting.head, Path(folder), progress)
            try:
                named_head(header, target, convert=False)
            except ModelFileError:
                # An EAGLE-1 head is recognisable only by its tensors, and PyTorch files have no header that
                # lists them.
                if not header.path.is_dir() or any(header.path.glob("*.safetensors")):
                    raise
        found = resolve_head(drafting.head, progress=progress)
        return _FoundHeads((named_head(found, target),))
    named, automatic = drafting.named_drafters & {*head_names()}, "auto" in drafting.methods
    if not named and not automatic:
        return _FoundHeads()
    options = [_checked_estimate(option, target) for option in head_options(target)]
    chosen = choose_heads(options, named, automatic=automatic)
    if chosen:
        return _FoundHeads(chosen, notice=describe_choice(chosen, options))
    wanted = [each for each in options if not each.problem and (automatic or each.method in named)]
    published = next((each for each in wanted if each.head is None), None)
    suggestion = (
        f", or a draft head with --head {published.name} ({published.expectation})" if published else ""
    )
    places = f"in the files of {target.name}, next to them or in the Hugging Face cache"
    advice = ""
    if wanted:
        download = f" (a download of {format_bytes(wanted[0].size_bytes)})" if wanted[0] is published else ""
        advice = f"use --head {wanted[0].name}{download}"
    return _FoundHeads(
        why_none=f"no draft head was found {places}",
        notice=describe_choice((), options),
        suggestion=suggestion,
        advice=advice,
    )


def _without_heads(found: _FoundHeads, why: str) -> _FoundHeads:
    """Return a result without heads. Raises OptionError if the user named a head.

    Args:
        found: The result with the heads.
        why: Why the heads cannot be used.
    """
    if any(head.source == "named" for head in found.chosen):
        raise OptionError(
            f"cannot use a draft head: {why}",
            "use --head none, or a method other than layerskip",
            option="head",
            code="option_not_supported",
        )
    return _FoundHeads(why_none=why)


def choose_heads(
    options: Sequence[HeadOption], named_methods: Collection[str], *, automatic: bool
) -> tuple[HeadOption, ...]:
    """Return the first usable head for each drafting method.

    Args:
        options: The heads for the target, most preferred first.
        named_methods: The methods that the user named. Heads for other methods are skipped.
        automatic: Whether the user allowed `auto`, which can use heads of any method.
    """
    chosen: dict[str, HeadOption] = {}
    for option in options:
        if option.is_usable and (automatic or option.method in named_methods):
            chosen.setdefault(option.method, option)
    return tuple(chosen.values())


def describe_choice(chosen: Sequence[HeadOption], options: Sequence[HeadOption]) -> str:
    """Return a one-line message about the chosen heads, or about an unusable head next to the target.

    Returns an empty string if there is nothing to report.
    """
    if not chosen:
        blocked = next((each for each in options if each.source == "beside" and each.problem), None)
        return f"not using the draft head {blocked.name}: {blocked.problem}" if blocked else ""
    start = "using the draft head" + ("s " if len(chosen) > 1 else " ")
    start += " and ".join(option.name for option in chosen)
    others = [option.name for option in options if option.is_usable and option not in chosen]
    if not others:
        return start
    count = (
        f"{len(others)} other heads also work with this model"
        if len(others) > 1
        else "another head also works with this model"
    )
    return f"{start}; {count}: {', '.join(others)} (choose with --head)"


def _checked_estimate(option: HeadOption, target: Resolved) -> HeadOption:
    """Mark a head as unusable if its memory cannot be estimated, for example because it is damaged."""
    if option.head is not None and option.is_usable:
        try:
            target.file_format.estimate_head(option.head, target.path, BLOCK_TOKENS)
        except EdgespecError as error:
            return replace(option, problem=error.what)
    return option


def with_own_adapters(options: LoadOptions, target: Resolved) -> LoadOptions:
    """Prepend the adapters that are part of the target, as in some Ollama models, to the user's own."""
    own = (Adapter(str(path)) for path in target.adapters)
    return replace(options, adapters=(*own, *options.adapters))


def with_projector(options: LoadOptions, target: Resolved, choice: str) -> LoadOptions:
    """Add the target's projector to its load options.

    Args:
        options: The load options to extend.
        target: The model that will read the images.
        choice: `auto`, `none` or the path of a projector.

    Raises:
        ModelFileError: The file is not a projector, or it belongs to another model.
        OptionError: The target cannot use a projector.
    """
    if not target.file_format.projectors or options.workers is not None:
        if choice in ("auto", "none"):
            return options
        why = "its layers are on workers" if options.workers else "only complete GGUF models can"
        raise OptionError(
            f"{target.name} cannot use an image projector, because {why}",
            "omit --mmproj, or use the model's original GGUF file on this machine",
            option="mmproj",
            code="option_not_supported",
        )
    if choice == "auto":
        choice = str(find_projector(target) or "none")
    if choice == "none":
        return replace(options, projector="")
    with about_option("mmproj", ModelFileError):
        _check_projector(Path(choice), target)
    return replace(options, projector=choice)


def _check_projector(path: Path, target: Resolved) -> None:
    """Raise ModelFileError if a file is not a projector that the target can use."""
    projector, info = read_projector(path), model_info_or_none(target)
    if not target.file_format.knows_projector(projector.kind):
        raise ModelFileError(
            f"{path} is an image projector of type {projector.kind}, which the installed llama.cpp does not"
            " support",
            "update edgespec and llama-cpp-python, or choose --mmproj none",
            code="model_file_not_supported",
        )
    if info and projector.hidden_size and info.hidden_size not in (0, projector.hidden_size):
        raise ModelFileError(
            f"{path} is the image projector of another model: its embeddings have {projector.hidden_size:,}"
            f" values, but those of {target.name} have {info.hidden_size:,}",
            "use the mmproj file that was published with this model, or --mmproj none",
            code="model_file_not_supported",
        )


def _check_is_model(found: Resolved) -> None:
    """Raise an error if `found` is a head instead of a model."""
    info = model_info_or_none(found)
    if info is not None and info.kind == "head":
        raise refused_head(found.name)


def _check_adapters(adapters: Sequence[Adapter], target: Resolved, drafting: DraftingOptions) -> None:
    """Raise an error if the target, or a method that the user named, does not support the adapters."""
    form = target.file_format
    if form.check_adapters is None:
        raise OptionError(
            f"{target.name} does not support adapters",
            "omit --adapter, or use another model",
            option="adapter",
            code="option_not_supported",
        )
    form.check_adapters(adapters, target.path)
    named = [each.name for each in methods() if each.name in drafting.named_drafters and each.find_target]
    if replaced := form.preparations.intersection(named):
        name = min(replaced)
        raise OptionError(
            f"the method {name!r} does not support adapters for GGUF models",
            "omit --adapter, or use another method, such as suffix",
            option="method",
            code="option_not_supported",
        )


def _prepared_target(found: Resolved, drafting: DraftingOptions, drafts_otherwise: bool) -> Resolved:
    """Return the prepared files that a method needs, or `found` if no method needs any."""
    fallbacks = [each for each in methods() if each.auto == "fallback"]
    for each in methods():
        if each.find_target is None:
            continue
        is_named = each.name in drafting.named_drafters
        if not is_named:
            if "auto" not in drafting.methods or drafts_otherwise or each not in fallbacks:
                continue
            if any(o.find_copy(found, False) or o.find_substitutes(found, False) for o in fallbacks):
                continue
        files: Resolved = each.find_target(found, is_named)
        if files is not found:
            return files
    return found


def _find_draft(
    target: Resolved,
    draft: str | None,
    find_model: FindModel,
    options: LoadOptions,
    failed: Mapping[Path, str],
) -> DraftChoice:
    if draft is None or draft == "none":
        return DraftChoice(None, "no draft model was requested")
    if draft != "auto":
        with about_option("draft"):
            return DraftChoice(find_model(draft), "you chose it", source="user")
    return choose_draft(target, options.memory_bytes, options.context_tokens, failed=failed)


def try_pair(pair: ModelPair, options: LoadOptions, progress: Progress | None) -> tuple[ModelPair, str]:
    """Check that models and heads can be loaded, in a child process in case damaged files crash it.

    For models larger than the memory limit in `options`, only the metadata is read. Raises the same errors as
    `check_loadable`, except that heads that `auto` chose are dropped if they fail, and `with_working_draft`
    replaces a draft model that fails.

    Returns:
        The pair without the heads that failed, and a possibly empty notice for the user.
    """
    models: list[TrialModel] = []
    drafts: list[TrialModel] = []
    trials: list[TrialModel] = []
    for found in filter(None, (pair.target, pair.draft)):
        with suppress(OSError, ModelFileError):
            size_bytes = sum(file.stat().st_size for file in found.file_format.files(found.path))
            runs = options.memory_bytes is None or size_bytes <= options.memory_bytes
            model = TrialModel(found.name, found.path, found.file_format, runs)
            (models if found is pair.target else drafts).append(model)
            if runs and found is pair.target:
                if options.adapters:
                    models.append(model._replace(adapters=options.adapters))
                trials = [model._replace(head=option.head) for option in pair.heads]
    try:
        return pair, check_loadable([*models, *drafts, *trials], progress)
    except EdgespecError as error:
        drops_heads = isinstance(error, ModelFileError) and any(each.source != "named" for each in pair.heads)
        if isinstance(error, CancelledError) or not (drops_heads or pair.draft_is_automatic):
            raise
    # Test the models and heads one by one to find which one fails. Results are cached, so nothing is tested
    # twice.
    check_loadable(models, progress)
    with loading_draft(pair):
        check_loadable(drafts, progress)
    if not drops_heads:
        return pair, check_loadable(trials, progress)
    return _without_crashing_heads(pair, trials, progress)


def _without_crashing_heads(
    pair: ModelPair, trials: Sequence[TrialModel], progress: Progress | None
) -> tuple[ModelPair, str]:
    heads, failures = [], []
    for option, trial in zip(pair.heads, trials, strict=True):
        try:
            check_loadable([trial], progress)
            heads.append(option)
        except ModelFileError as error:
            failures.append(error.what)
    reason = "; ".join(failures)
    return replace(pair, heads=tuple(heads), why_no_head=reason, why_heads=""), reason


def draft_load_options(
    options: LoadOptions, drafting: DraftingOptions, context_tokens: int, memory_bytes: int | None
) -> LoadOptions:
    """Return the draft model's load options, derived from the target's.

    Args:
        options: The target's load options.
        drafting: The drafting options.
        context_tokens: The context size of the draft model.
        memory_bytes: The memory limit of the draft model, or None for no limit.
    """
    adapts = drafting.arguments["draft_branches"] in ((), "auto")
    gpu_layers = drafting.arguments["draft_gpu_layers"]
    if gpu_layers is None:
        # If the planner moved some of the target's layers to main memory, the draft model stays on the GPU,
        # because it runs several times per round. If the planner moved the whole target off the GPU, the GPU
        # was too small.
        gpu_layers = 0 if options.gpu_layers == 0 else drafting.arguments["gpu_layers"]
    return replace(
        options.for_draft(),
        gpu_layers=gpu_layers,
        context_tokens=context_tokens,
        memory_bytes=memory_bytes,
        max_logit_rows=DRAFT_ROWS if adapts else None,
    )


def options_in_pair(found: Resolved, other: Resolved | None, options: LoadOptions) -> LoadOptions:
    """Return the options for loading `found`, one model of a pair.

    If the other model uses a different backend, options that the backend of `found` does not support are
    reset to their defaults.
    """
    if other is None or same_backend(found.format, other.format):
        return options
    foreign = set(found.backend.ignored_options)
    if options.is_draft and not found.backend.shares_kv_type:
        foreign.add("kv_type")
    defaults = LoadOptions()
    return replace(options, **{name: getattr(defaults, name) for name in foreign})
