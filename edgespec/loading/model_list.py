"""List the available models: on this machine, in the catalogue and on Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from edgespec.errors import DownloadError, EdgespecError, MemoryBudgetError
from edgespec.loading.constants import MEASURING_BYTES, STREAMED_SHARE
from edgespec.loading.planning import budget_for
from edgespec.loading.speed_prediction import (
    SpeedPrediction,
    catalogue_weights,
    predict_entry,
    predict_speed,
    recommended_draft,
)
from edgespec.memory.budget import available_bytes
from edgespec.methods.costs.machine_speed import MachineSpeed, measure_machine, saved_machine_speed
from edgespec.model.base import Progress
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.projector import estimate_projector
from edgespec.model.model_facts import PassWeights
from edgespec.model.registry import FileFormat, backend_of, format_of
from edgespec.options.settings import check_load_arguments
from edgespec.store.catalogue import ModelEntry, ModelFormat, load_catalogue, needed_bytes, short_name
from edgespec.store.drafts import DraftOption, choose_draft, draft_options
from edgespec.store.hub_files import cached_model
from edgespec.store.installed import (
    InstalledModel,
    InstalledModels,
    find_installed,
    find_projector,
    loaded_bytes,
    read_model_info,
)
from edgespec.store.reference import Resolved, resolve
from edgespec.system.disks import largest_file, read_bytes_per_second
from edgespec.system.files import format_bytes

# The quantisation that edgespec downloads by default, and its average number of bits per weight.
_QUANTISATION, _BITS = "Q4_K_M", 4.85
# Timeout in seconds for a search, kept short because the user is waiting.
_SEARCH_SECONDS = 10.0

ModelPlace = Literal["embedded", "hub", "ollama", "lmstudio", "path", "catalogue", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableModel:
    """A model that is on this machine or can be downloaded.

    Attributes:
        reference: A reference to the model, for `load` and `download_model`.
        place: Where the model is: `embedded` (part of edgespec), `hub` (the Hugging Face cache), `ollama`,
            `lmstudio`, or `path` (elsewhere on this machine). Models in `catalogue` and `search` (results of
            `search_models`) are not on this machine.
        parameters: Number of parameters. 0 if unknown.
        size_bytes: Size of the model's files. Approximate if they are not on this machine, and 0 if unknown.
        draft: A reference to the recommended draft model. Empty if there is none.
        download_bytes: Total size of the files to download: the model, the draft model, and the projectors
            that are downloaded with them.
        needed_bytes: Approximate memory for both models with a context of 8,192 tokens, and for images if
            that fits within the memory budget too.
        fits: Whether `needed_bytes` is within the memory budget. True if the size is unknown.
        speed: The expected speed. None if this machine has not been measured.
        format: Name of the file format.
        path: The model's file or folder. None if it is not on this machine.
        entry: The model's catalogue entry, or None if it has none.
        family: Name of the model family. Empty if unknown.
        notice: A note for users of the model. Usually empty.
        is_streamed: Whether the model is larger than memory but can run, with weights read from disk in every
            pass.
        projector_bytes: Size of the model's projector, which lets it see images. Approximate if it is not on
            this machine, and 0 if there is none or it is unknown.
    """

    reference: str
    place: ModelPlace
    parameters: int
    size_bytes: int
    draft: str
    download_bytes: int
    needed_bytes: int
    fits: bool
    speed: SpeedPrediction | None
    format: ModelFormat = "gguf"
    path: Path | None = None
    entry: ModelEntry | None = None
    family: str = ""
    notice: str = ""
    is_streamed: bool = False
    projector_bytes: int = 0

    @property
    def can_run(self) -> bool:
        """Whether the model runs on this machine, in memory or with weights read from disk."""
        return self.fits or self.is_streamed

    @property
    def is_installed(self) -> bool:
        """Whether the model is on this machine."""
        return self.place not in ("catalogue", "search")


def list_models(memory: str | int | None = None, also: Sequence[str] = ()) -> list[AvailableModel]:
    """List the models on this machine, then the other models in the catalogue, without downloading any.

    Args:
        memory: Memory that edgespec may use, such as "8GiB". Defaults to the available memory.
        also: Paths of models to list even if they are not in a folder that edgespec knows. Paths without a
            usable model are left out.

    Returns:
        The models, with each group sorted by size. MLX models are listed only if MLX can run on this machine.
        They come after the GGUF models except on Apple Silicon, because llama.cpp is faster elsewhere.

    Raises:
        OptionError: `memory` is not a size.
    """
    budget_bytes = _budget_bytes(memory)
    installed = _with_paths(find_installed(include_embedded=True), also)
    here: list[AvailableModel] = []
    listed: list[AvailableModel] = []
    for form in map(format_of, ("gguf", "mlx")):
        if not form.runs_here:
            continue
        machine = saved_machine_speed(form)
        here += installed_models(form, installed, machine, budget_bytes)
        listed += catalogue_models(form, installed, machine, budget_bytes)
    return [*_sorted(here), *_sorted(listed)]


def _sorted(models: Iterable[AvailableModel]) -> list[AvailableModel]:
    """Sort models by size, listing formats made for other hardware last."""
    return sorted(models, key=lambda each: (not format_of(each.format).is_fast_here(), each.size_bytes))


def _with_paths(installed: InstalledModels, paths: Sequence[str]) -> InstalledModels:
    """Return the installed models, plus those at the given paths."""
    models = list(installed.models)
    for path in paths:
        with suppress(EdgespecError):
            found = resolve(str(Path(path).absolute()), allow_download=False)
            if all(model.path.absolute() != found.path for model in models):
                info = read_model_info(found)
                models.append(
                    InstalledModel(str(found.path), "path", found.path, found.format, info, found.entry)
                )
    return replace(installed, models=tuple(models))


def search_models(text: str, *, memory: str | int | None = None, limit: int = 20) -> list[AvailableModel]:
    """Search Hugging Face for GGUF models.

    Args:
        text: Words to search for in repository names, such as "qwen coder".
        memory: Memory that edgespec may use, such as "8GiB". Defaults to the available memory.
        limit: Maximum number of results.

    Returns:
        The models, most downloaded first. Each size is an estimate for a Q4_K_M file, computed from the
        number of parameters.

    Raises:
        DownloadError: Hugging Face cannot be reached or rejects the search.
        OptionError: `memory` is not a size.
    """
    budget_bytes = _budget_bytes(memory)
    machine = saved_machine_speed(format_of("gguf"))
    return [_found_model(entry, machine, budget_bytes) for entry in _search_hub(text, limit)]


def _search_hub(text: str, limit: int) -> list[ModelEntry]:
    """Return catalogue entries for the GGUF models on Hugging Face that match a query, most downloaded first.

    Sizes are estimated from the parameter count, or 0 if it is unknown.
    """
    import httpx2
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled

    params: dict[str, str | int | list[str]] = {
        "search": text,
        "filter": "gguf",
        "sort": "downloads",
        "limit": limit,
        "expand": ["gguf", "gated"],
    }
    try:
        # Do not use `HfApi.list_models`, which retries for half a minute if the hub is unreachable.
        response = get_session().get(
            f"{constants.ENDPOINT}/api/models", params=params, timeout=_SEARCH_SECONDS
        )
        response.raise_for_status()
        return [
            _hub_entry(each["id"], each.get("gguf") or {}, is_gated=bool(each.get("gated")))
            for each in response.json()
        ]
    except OfflineModeIsEnabled as error:
        raise _search_failed(
            "offline mode is on (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE", "offline"
        ) from error
    except httpx2.HTTPStatusError as error:
        raise _search_failed(
            f"{constants.ENDPOINT} answered with status {error.response.status_code}", "try again later"
        ) from error
    except httpx2.HTTPError as error:
        raise _search_failed(
            f"{constants.ENDPOINT} cannot be reached",
            "check your network connection and try again",
            "network_unreachable",
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _search_failed(
            f"{constants.ENDPOINT} does not seem to be a Hugging Face server",
            "check HF_ENDPOINT and your proxy settings",
        ) from error


def _search_failed(reason: str, next_step: str, code: str = "") -> DownloadError:
    return DownloadError(f"cannot search Hugging Face: {reason}", next_step, code=code)


def _hub_entry(repository: str, facts: dict[str, Any], *, is_gated: bool) -> ModelEntry:
    """Create a catalogue entry for a repository. `facts` is the hub's metadata for one of its GGUF files."""
    if known := load_catalogue().of_repository(repository):
        return known
    parameters = int(facts.get("total") or 0)
    return ModelEntry(
        name=f"hf:{repository}",
        family=str(facts.get("architecture", "")),
        parameters=parameters,
        quantisation=_QUANTISATION,
        context_tokens=int(facts.get("context_length") or 0),
        approximate_file_bytes=round(parameters * _BITS / 8),
        licence="",
        chat_template="",
        gguf_repository=repository,
        notice=f"you must first accept its licence at huggingface.co/{repository}" if is_gated else "",
        is_gated=is_gated,
    )


def download_model(reference: str, progress: Progress | None = None) -> Path:
    """Download a model into the Hugging Face cache unless it is already on this machine. Return its path.

    An interrupted download resumes where it left off.

    Args:
        reference: A reference to the model.
        progress: Called with a description and the completed fraction. Returning False cancels.

    Raises:
        CancelledError: `progress` returned False.
        DownloadError: The download failed, for example because of the network or a full disk.
        ModelNotFoundError: There is no such model.
    """
    return resolve(reference, progress=progress).path


def measure_speed(progress: Progress | None = None) -> str:
    """Measure the speed of this machine and save it, so that `list_models` can estimate the models' speeds.

    The measurement takes up to 20 seconds.

    Args:
        progress: Called with a description and the completed fraction. Returning False cancels.

    Returns:
        The reason why the result was not saved, or an empty string if it was.

    Raises:
        CancelledError: `progress` returned False.
        EdgespecError: A temporary file cannot be written.
        MemoryBudgetError: Less than 1 GiB of memory is free.
    """
    if (free_bytes := available_bytes()) < MEASURING_BYTES:
        raise MemoryBudgetError(
            f"measuring the speed of this machine needs {format_bytes(MEASURING_BYTES)} of memory, but only"
            f" {format_bytes(free_bytes)} is free",
            "close other programs, then try again",
            code="out_of_memory",
        )
    return measure_machine(format_of("gguf"), progress).notice


def _budget_bytes(memory: str | int | None) -> int:
    arguments = check_load_arguments({"memory": memory})
    return budget_for([backend_of("gguf")], arguments).total_bytes


def installed_models(
    form: FileFormat, installed: InstalledModels, machine: MachineSpeed | None, budget_bytes: int
) -> Iterator[AvailableModel]:
    """Yield the installed models in one format, except those that can only serve as draft models."""
    embedded_drafts = {
        name for entry in load_catalogue().entries if entry.embedded_file for name in entry.drafts
    }
    for model in installed.models:
        is_draft_only = model.entry is not None and model.entry.name in embedded_drafts
        if model.format == form.name and not is_draft_only:
            yield _installed_model(form, model, installed, machine, budget_bytes)


def _installed_model(
    form: FileFormat,
    model: InstalledModel,
    installed: InstalledModels,
    machine: MachineSpeed | None,
    budget_bytes: int,
) -> AvailableModel:
    target = resolve(model.reference, allow_download=False)
    draft = _draft(target, installed, budget_bytes)
    file_bytes = loaded_bytes(model.info, model.entry)
    needed = needed_bytes(file_bytes + (draft.size_bytes if draft else 0), model.info.parameters)
    projector_bytes, image_bytes = _projector(target)
    read_seconds = _read_seconds(form, file_bytes, needed - budget_bytes, model.path, model.entry)
    found = load_catalogue().find(draft.reference) if draft else None
    draft_entry = found[0] if found else None
    weights = draft_weights = None
    try:
        weights = _weights(form, model.path, model.entry)
        if draft is not None:
            draft_weights = _weights(format_of(draft.format), draft.path, draft_entry)
    except (EdgespecError, OSError):
        # List the model even if its files are unreadable. Loading it reports the error.
        weights = None
    speed = None
    if machine is not None and weights is not None:
        speed = predict_speed(
            machine,
            weights,
            draft_weights,
            draft.parameters / max(model.info.parameters, 1) if draft else 0.0,
            draft.acceptance_rate if draft else None,
            read_seconds=_reads(read_seconds, model.entry),
        )
    return AvailableModel(
        reference=model.reference,
        place=model.place,
        parameters=model.info.parameters,
        size_bytes=file_bytes,
        draft=draft.reference if draft else "",
        download_bytes=draft_entry.download_bytes if draft and draft_entry and draft.path is None else 0,
        needed_bytes=_with_images(needed, image_bytes, budget_bytes),
        fits=needed <= budget_bytes,
        speed=speed,
        format=model.format,
        path=model.path,
        entry=model.entry,
        family=model.info.family,
        notice=model.entry.notice if model.entry else "",
        is_streamed=bool(read_seconds),
        projector_bytes=projector_bytes,
    )


def _projector(model: Resolved) -> tuple[int, Sequence[int]]:
    """Return the size of an installed model's projector, and the memory that images take.

    Returns:
        The size, or 0 if the model has no projector. Then the memory for images of any size, and the memory
        if they are reduced to about a megapixel.
    """
    path = find_projector(model) if model.file_format.projectors else None
    # List the model without its projector if that is damaged. Loading reports the error.
    with suppress(EdgespecError, OSError):
        if path is not None:
            estimates = (
                estimate_projector(path, on_gpu=False, small_images=small) for small in (False, True)
            )
            return path.stat().st_size, [sum(part.bytes for part in each.parts) for each in estimates]
    return 0, ()


def _with_images(needed: int, image_bytes: Iterable[int], budget_bytes: int) -> int:
    """Return the memory that a model needs with images, or without them if only that fits.

    This is what the planner does: it reduces images or turns them off rather than reject the model.

    Args:
        needed: Memory that the model needs without images.
        image_bytes: The amounts of memory that images can take, most first.
        budget_bytes: Memory that edgespec may use.
    """
    return next((needed + each for each in image_bytes if needed + each <= budget_bytes), needed)


def _read_seconds(
    form: FileFormat, file_bytes: int, excess_bytes: int, path: Path | None, entry: ModelEntry | None
) -> float | None:
    """Return the time each pass spends reading weights from disk, or 0 if the model fits in memory.

    Args:
        form: The format of the model's files.
        file_bytes: Size of the model's files.
        excess_bytes: Number of bytes by which the model exceeds the available memory.
        path: A file or folder on the disk to measure, or None if there is none.
        entry: The model's catalogue entry, which says what share of the weights a token uses.

    Returns:
        The time in seconds, or None if the model cannot run.
    """
    if excess_bytes <= 0:
        return 0.0
    can_stream = backend_of(form.name).streams(None)
    if excess_bytes > STREAMED_SHARE * file_bytes or path is None or not can_stream:
        return None
    speed = _disk_speed(path)
    # Of a mixture of experts, a pass reads only those that it uses.
    read_bytes = excess_bytes * (entry.active_fraction if entry else 1.0)
    return read_bytes / speed if speed else None


def _reads(read_seconds: float | None, entry: ModelEntry | None) -> Callable[[int], float]:
    """Return the time that a pass over a number of tokens spends reading weights from disk.

    Args:
        read_seconds: The time of a pass over one token, or None if the model cannot run.
        entry: The model's catalogue entry, or None. Tokens are assumed to choose experts independently.
    """
    share = entry.active_fraction if entry else 1.0
    return lambda width: (read_seconds or 0.0) * (1 - (1 - share) ** width) / share


@cache
def _disk_speed(path: Path) -> float:
    """Return the read speed of the disk that holds a model, in bytes per second, or 0 if it is unknown."""
    try:
        return read_bytes_per_second(largest_file(gguf_files(path)))
    except (EdgespecError, OSError):
        return 0.0


def _draft(target: Resolved, installed: InstalledModels, budget_bytes: int) -> DraftOption | None:
    """Return the draft model that `--draft auto` would use, or else one that can be downloaded."""
    options = draft_options(target, installed)
    chosen = None
    # If the user chose an unusable draft model, list the model without it. Loading reports the error.
    with suppress(EdgespecError):
        chosen = choose_draft(target, budget_bytes, installed=installed).draft
    return next(
        (each for each in options if each.path == (chosen.path if chosen is not None else None)),
        None,
    )


def _weights(form: FileFormat, path: Path | None, entry: ModelEntry | None) -> PassWeights | None:
    """Return a model's weights from its file or, if it is not installed, from its catalogue entry."""
    if path is not None and form.read_pass_weights is not None:
        return form.read_pass_weights(path)
    return catalogue_weights(entry) if entry else None


def catalogue_models(
    form: FileFormat, installed: InstalledModels, machine: MachineSpeed | None, budget_bytes: int
) -> Iterator[AvailableModel]:
    """Yield the catalogue models in one format that are not installed."""
    here = [each for each in installed.models if each.format == form.name]
    names = {each.entry.name for each in here if each.entry}
    # A model in a Python package is the same as one of this family and size on Hugging Face.
    packaged = {
        (each.entry.family, each.entry.parameters): each.entry
        for each in here
        if each.entry and each.entry.package
    }
    # Assume that downloads go to the disk that holds the largest installed model. The disk's speed is
    # measured by reading this model, because a large file is the least likely to be cached.
    largest = max(here, key=lambda each: each.info.size_bytes, default=None)
    for entry in load_catalogue().entries:
        is_here = entry.name in names or (entry.family, entry.parameters) in packaged
        if entry.format == form.name and entry.repository and not is_here:
            draft = recommended_draft(entry)
            if draft is not None:
                draft = packaged.get((draft.family, draft.parameters), draft)
            draft_bytes = draft.approximate_file_bytes if draft else 0
            file_bytes = entry.approximate_file_bytes
            needed = needed_bytes(file_bytes + draft_bytes, entry.parameters)
            read_seconds = _read_seconds(
                form, file_bytes, needed - budget_bytes, largest.path if largest else None, entry
            )
            reads = _reads(read_seconds, entry)
            yield AvailableModel(
                reference=short_name(entry),
                place="catalogue",
                parameters=entry.parameters,
                size_bytes=file_bytes,
                draft=short_name(draft) if draft else "",
                download_bytes=entry.download_bytes
                + (draft.download_bytes if draft and draft.name not in names else 0),
                needed_bytes=_with_images(needed, _image_bytes(entry), budget_bytes),
                fits=needed <= budget_bytes,
                speed=predict_entry(entry, machine, read_seconds=reads) if machine else None,
                format=entry.format,
                entry=entry,
                family=entry.family,
                notice=entry.notice,
                is_streamed=bool(read_seconds),
                projector_bytes=entry.approximate_projector_bytes,
            )


def _image_bytes(entry: ModelEntry) -> Sequence[int]:
    """Return the approximate memory that images take, if the model sees any."""
    return (entry.image_bytes,) if entry.image_bytes else ()


def _found_model(entry: ModelEntry, machine: MachineSpeed | None, budget_bytes: int) -> AvailableModel:
    """Describe a model found on Hugging Face."""
    size_bytes, parameters = entry.approximate_file_bytes, entry.parameters
    needed = needed_bytes(size_bytes, parameters) if size_bytes else 0
    path = cached_model(entry.repository, None)
    return AvailableModel(
        reference=short_name(entry),
        place="hub" if path else "search",
        parameters=parameters,
        size_bytes=size_bytes,
        draft=short_name(draft) if (draft := recommended_draft(entry)) else "",
        download_bytes=entry.download_bytes,
        needed_bytes=_with_images(needed, _image_bytes(entry), budget_bytes),
        fits=needed <= budget_bytes,
        speed=predict_entry(entry, machine) if machine and size_bytes else None,
        path=path,
        entry=entry,
        family=entry.family,
        notice=entry.notice,
        projector_bytes=entry.approximate_projector_bytes,
    )
