"""Compare the catalogue with the headers of the files on Hugging Face. See `scripts/check_catalogue`."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edgespec.cli.interrupt import Stop
from edgespec.cli.screen import ProgressLine, print_table
from edgespec.errors import DownloadError, EdgespecError
from edgespec.model.formats.head_files import head_info, method_of, why_not_made_for
from edgespec.model.model_facts import ModelInfo
from edgespec.store.catalogue import Catalogue, HeadEntry, ModelEntry, load_catalogue
from edgespec.store.download import HEAD, MODEL, Progress
from edgespec.store.hub_files import is_projector, snapshot_folder
from edgespec.store.remote_header import fetch_metadata
from edgespec.system.files import format_bytes

# Largest relative difference at which two numbers count as equal. The catalogue rounds sizes to three digits,
# and publishers count parameters with or without the layers for images and multi-token prediction.
_TOLERANCE = 0.03
# The same tolerance for estimates: the sizes of MLX models, estimated from their bits per weight, and of
# heads, estimated from their number of weights.
_ESTIMATE_TOLERANCE = 0.15
# Errors that all other repositories would have too.
_UNREACHABLE = ("network_unreachable", "offline")


class Difference(NamedTuple):
    """A fact that differs between the catalogue and the files.

    Attributes:
        name: Name of the model or head.
        fact: What differs.
        listed: The value in the catalogue.
        found: The value in the files.
    """

    name: str
    fact: str
    listed: str
    found: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences, and return 1 if there are any or the hub cannot be reached."""
    catalogue = load_catalogue()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to check, by default all")
    entries, heads = _selected(catalogue, parser.parse_args(arguments).names, parser)
    with tempfile.TemporaryDirectory() as folder, ProgressLine(Stop()) as progress:
        try:
            differences = compare(entries, heads, Path(folder), progress)
        except DownloadError as error:
            print(f"The catalogue was not checked: {error.what}", file=sys.stderr)
            return 1
    if differences:
        print_table(("NAME", "FACT", "CATALOGUE", "FILES"), differences)
    print(f"Checked {len(entries)} models and {len(heads)} heads: {len(differences)} differences.")
    return 1 if differences else 0


def compare(
    entries: Sequence[ModelEntry], heads: Sequence[HeadEntry], folder: Path, progress: Progress
) -> list[Difference]:
    """Return the differences between catalogue entries and the headers of their files on Hugging Face.

    Args:
        entries: The models.
        heads: The heads. They are compared with those of their targets that are in `entries`.
        folder: Folder for the downloaded headers.
        progress: Called with a description and the completed fraction.

    Raises:
        DownloadError: Hugging Face cannot be reached.
    """
    differences: list[Difference] = []
    models: dict[str, ModelInfo] = {}
    checked: list[ModelEntry | HeadEntry] = [*entries, *heads]
    for done, entry in enumerate(checked):
        progress(f"checking {entry.name}", done / len(checked))
        try:
            if isinstance(entry, HeadEntry):
                differences += _head_differences(entry, models, folder)
            else:
                path = _model_headers(entry, folder)
                models[entry.name] = info = entry.file_format.read_info(path)
                differences += _model_differences(entry, info)
                differences += _projector_differences(entry, path)
        except EdgespecError as error:
            if error.code in _UNREACHABLE:
                raise
            differences.append(Difference(entry.name, "files", entry.repository, error.what))
    for entry in entries:
        differences += _draft_differences(entry, models)
    return differences


def _selected(
    catalogue: Catalogue, names: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[ModelEntry], list[HeadEntry]]:
    """Return the models to check, with their draft models and heads."""
    wanted = {entry.name for entry in catalogue.entries}
    if names:
        found = [catalogue.find(name) or parser.error(f"there is no model {name}") for name in names]
        wanted = {name for entry, _ in found for name in (entry.name, *entry.drafts)}
    entries = [entry for entry in catalogue.entries if entry.name in wanted and entry.repository]
    heads = {head.name: head for entry in entries for head in catalogue.heads_for(entry) if head.repository}
    return entries, list(heads.values())


def _model_headers(entry: ModelEntry, folder: Path) -> Path:
    """Download the headers of a model and of its projector. Return the model's file or folder."""
    quantisation = entry.quantisation if entry.file_format.one_file_per_quantisation else None
    return fetch_metadata(entry.repository, quantisation, folder=folder / entry.name, content=MODEL)


def _model_differences(entry: ModelEntry, info: ModelInfo) -> Iterator[Difference]:
    is_estimated = not entry.file_format.one_file_per_quantisation
    size_tolerance = _ESTIMATE_TOLERANCE if is_estimated else _TOLERANCE
    if info.parameters and not is_estimated and _differ(entry.parameters, info.parameters, _TOLERANCE):
        yield Difference(entry.name, "parameters", f"{entry.parameters:,}", f"{info.parameters:,}")
    if _differ(entry.approximate_file_bytes, info.size_bytes, size_tolerance):
        yield Difference(
            entry.name, "size", format_bytes(entry.approximate_file_bytes), format_bytes(info.size_bytes)
        )
    if info.context_tokens and entry.context_tokens != info.context_tokens:
        yield Difference(entry.name, "context", f"{entry.context_tokens:,}", f"{info.context_tokens:,}")
    if info.licence and not _words(info.licence) <= _words(entry.licence):
        yield Difference(entry.name, "licence", entry.licence, info.licence)
    listed, found = (sorted(set(map(method_of, heads))) for heads in (entry.heads, info.heads))
    if listed != found:
        yield Difference(entry.name, "heads", ", ".join(listed) or "none", ", ".join(found) or "none")
    if bool(entry.active_parameters) != bool(info.experts):
        yield Difference(
            entry.name, "experts", f"{entry.active_parameters:,} active", f"{info.experts} experts"
        )


def _projector_differences(entry: ModelEntry, path: Path) -> Iterator[Difference]:
    snapshot = snapshot_folder(path / "config.json" if path.is_dir() else path)
    assert snapshot is not None
    # Only the chosen projector was downloaded, as a sparse file of the original size.
    files = (file for file in snapshot.rglob("*") if is_projector(file.name))
    found = next((file.stat().st_size for file in files), 0)
    listed = entry.approximate_projector_bytes
    if _differ(listed, found, _TOLERANCE):
        sizes = (format_bytes(size) if size else "none" for size in (listed, found))
        yield Difference(entry.name, "projector", *sizes)


def _draft_differences(entry: ModelEntry, models: dict[str, ModelInfo]) -> Iterator[Difference]:
    """Yield the recommended draft models whose vocabulary differs from the target's."""
    if (target := models.get(entry.name)) is None or not target.vocabulary:
        return
    for name in entry.drafts:
        draft = models.get(name)
        if draft and draft.vocabulary not in ("", target.vocabulary):
            found = f"{draft.vocab_size:,}, other than the target's {target.vocab_size:,}"
            yield Difference(entry.name, f"tokens of {name}", "the same", found)


def _head_differences(entry: HeadEntry, models: dict[str, ModelInfo], folder: Path) -> Iterator[Difference]:
    file = entry.gguf_file or None
    info = head_info(fetch_metadata(entry.repository, file, folder=folder / entry.name, content=HEAD))
    if method_of(entry.kind) not in map(method_of, info.heads):
        yield Difference(entry.name, "kind", entry.kind, ", ".join(info.heads) or info.kind)
    if _differ(entry.approximate_file_bytes, info.size_bytes, _ESTIMATE_TOLERANCE):
        yield Difference(
            entry.name, "size", format_bytes(entry.approximate_file_bytes), format_bytes(info.size_bytes)
        )
    if info.licence and not _words(info.licence) <= _words(entry.licence):
        yield Difference(entry.name, "licence", entry.licence or "none", info.licence)
    for name in entry.targets:
        if (target := models.get(name)) and (why := why_not_made_for(info, target)):
            yield Difference(entry.name, "target", name, why)


def _differ(listed: int, found: int, tolerance: float) -> bool:
    return abs(listed - found) > tolerance * max(listed, found)


def _words(licence: str) -> set[str]:
    """Return the words and numbers in a licence's name, such as `apache`, `2` and `0`."""
    return set(re.findall(r"[a-z]+|\d+", licence.lower()))


if __name__ == "__main__":
    sys.exit(main())
