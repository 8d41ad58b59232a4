"""`edgespec models`: list, show, download, name and remove models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import click

from edgespec.cli.failures import DONE, FAILED
from edgespec.cli.help import HelpfulGroup
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.models_list import list_models
from edgespec.cli.models_shown import Shown, is_head_folder, published_head
from edgespec.cli.options import json_option, model_reference
from edgespec.cli.screen import ProgressLine, is_terminal, line_of, note, print_json, printable
from edgespec.errors import (
    BackendMissingError,
    MemoryBudgetError,
    ModelFileError,
    ModelNotFoundError,
    NotDownloadedError,
    OptionError,
)
from edgespec.system.files import format_bytes

if TYPE_CHECKING:
    from edgespec import ModelFacts
    from edgespec.store.catalogue import ModelEntry
    from edgespec.store.reference import Resolved

__all__ = ["command", "write_name"]

_LOOK_CONTEXT_TOKENS = 256


class _Models(HelpfulGroup):
    foreign_commands = {"ls": "list", "rm": "remove MODEL", "cp": "alias", "download": "pull MODEL"}  # noqa: RUF012


@click.group(
    "models",
    cls=_Models,
    short_help="List, show, download, name and remove models.",
    examples=(
        "edgespec models list",
        "edgespec models show demo",
        "edgespec models show ./model.gguf",
        "edgespec models pull 8b-q4",
        "edgespec models alias big 70b-q4",
    ),
)
def command() -> None:
    """List, show, download, name and remove models."""


command.add_command(list_models)


@command.command(
    "show",
    short_help="Show a model, and what can make it faster.",
    examples=(
        "edgespec models show demo",
        "edgespec models show 8b-q4 --json",
        "edgespec models show ./my.gguf --probe",
    ),
)
@model_reference("reference")
@click.option("--probe", is_flag=True, help="Also load the model, and test what it supports.")
@json_option
def show_model(reference: str, probe: bool, as_json: bool) -> int:
    """Show details of a model, and which draft models and heads can make it faster. MODEL can also be a head.

    The expected speed-up of two models is estimated from their sizes until they have been used together. The
    exit status is 1 if a file could not be read.
    """
    from edgespec.model.formats.head_files import head_info
    from edgespec.store.catalogue import load_catalogue
    from edgespec.store.drafts import choose_draft, draft_options
    from edgespec.store.heads import head_options, published_heads, resolve_head
    from edgespec.store.installed import find_installed, read_model_info, recommended_sampling, refusal_of
    from edgespec.store.reference import resolve

    head = published_head(reference)
    is_head = head is not None or is_head_folder(reference)
    shown = Shown(reference, _catalogued(reference), head)
    try:
        find = resolve_head if is_head else resolve
        found = shown.found = find(reference, allow_download=False)
    except ModelNotFoundError as error:
        if shown.entry is None and head is None:
            raise
        # A version that does not exist, such as another quantisation, has nothing to show.
        if shown.entry and not isinstance(error, NotDownloadedError) and not load_catalogue().find(reference):
            raise
        shown.missing, shown.next_step = error.what, error.next_step
        if shown.entry is not None:
            shown.heads = published_heads(shown.entry)
    else:
        shown.entry = found.entry or shown.entry
        installed = find_installed(include_embedded=True)
        try:
            shown.info = head_info(found.path) if is_head else read_model_info(found)
            shown.problem = refusal_of(found, shown.info)
        except ModelFileError as error:
            shown.problem = str(error)
        # A model that the backend rejects needs no draft model.
        if not shown.info or (shown.info.kind == "model" and not shown.problem):
            shown.options, shown.choice = draft_options(found, installed), choose_draft(found)
            shown.heads = head_options(found)
        if probe:
            has_gpu_layers = "gpu_layers" not in found.backend.ignored_options
            shown.facts, shown.problem = interruptible(lambda stop: _facts(stop, reference, has_gpu_layers))
    if not is_head:
        shown.sampling = recommended_sampling(shown.found, shown.entry)
    if as_json:
        print_json(shown.to_json())
    else:
        lines = shown.lines()
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            click.echo(f"{name:{width}}  {line_of(value)}")
    return FAILED if shown.problem else DONE


@command.command(
    "pull",
    short_help="Download a model.",
    examples=("edgespec models pull 8b-q4", "edgespec models pull hf:user/repo:Q4_K_M"),
)
@model_reference("reference")
@json_option
def pull_model(reference: str, as_json: bool) -> None:
    """Download a model or a head into the Hugging Face cache, unless it is already on this machine.

    If a download is interrupted, run the command again to continue it.
    """

    def fetch(stop: Stop) -> Resolved:
        with ProgressLine(stop) as progress:
            return _resolver(reference)(reference, progress=progress)

    found = interruptible(fetch)
    if as_json:
        print_json(
            {"reference": reference, "path": str(found.path), "source": found.source, "note": found.note}
        )
    else:
        click.echo(printable(found.note))


@command.command(
    "alias",
    short_help="Give a model an alias of your choice.",
    examples=("edgespec models alias big hf:user/repo:Q4_K_M", "edgespec models alias fast llama3.2:1b"),
)
@click.argument("name")
@model_reference("reference")
@json_option
def set_alias(name: str, reference: str, as_json: bool) -> None:
    """Make NAME an alias for MODEL. Your aliases take precedence over the names in `edgespec models list`.

    To delete an alias, run `edgespec models remove NAME`.
    """
    from edgespec.store.aliases import check_alias

    remark = check_alias(name.strip(), reference.strip())
    write_name("aliases", name.strip(), reference.strip())
    value = {"alias": name, "reference": reference}
    _print_change(f"{name} is now an alias for {reference}.", remark, value, as_json)


@command.command(
    "pair",
    short_help="Choose the draft model that is used with a model.",
    examples=(
        "edgespec models pair 70b-q4 1b-q4",
        "edgespec models pair 8b-q4 none",
        "edgespec models pair 70b-q4 --remove",
    ),
)
@model_reference("target")
@click.argument("draft", metavar="DRAFT", required=False)
@click.option(
    "--remove", is_flag=True, help="Delete your choice and let edgespec choose the draft model again."
)
@json_option
def set_pair(target: str, draft: str | None, remove: bool, as_json: bool) -> None:
    """Choose the draft model that edgespec uses with MODEL, unless a command names another one with --draft.

    If DRAFT is `none`, MODEL runs without a draft model.
    """
    from edgespec.store.aliases import check_pair

    if (draft is None) != remove:
        raise click.UsageError("specify either DRAFT or --remove")
    target = target.strip()
    remark = check_pair(target, draft.strip()) if draft is not None else ""
    write_name("pairs", target, draft.strip() if draft is not None else None)
    if draft is None:
        change = f"The draft model for {target} will be chosen automatically again."
    elif draft.strip() == "none":
        change = f"{target} now runs without a draft model."
    else:
        change = f"{target} now uses the draft model {draft}."
    _print_change(change, remark, {"target": target, "draft": draft}, as_json)


@command.command(
    "remove",
    short_help="Delete an alias or a downloaded model.",
    examples=("edgespec models remove big", "edgespec models remove hf:user/repo:Q4_K_M --yes"),
)
@model_reference("reference")
@click.option("--yes", is_flag=True, help="Delete a download without asking for confirmation.")
@json_option
def remove_model(reference: str, yes: bool, as_json: bool) -> None:
    """Delete an alias, or a model or head in the Hugging Face cache, which other programs may also use.

    Models of Ollama and LM Studio, and your own files, are never deleted.
    """
    from edgespec.store.catalogue import user_aliases
    from edgespec.store.installed import plan_removal

    name = reference.strip()
    if name.lower() in user_aliases():
        write_name("aliases", name, None)
        _print_change(f"Deleted the alias {name}.", "", {"removed": name, "freed_bytes": 0}, as_json)
        return
    found = _resolver(name)(name, allow_download=False)
    removal = plan_removal(found)
    size = format_bytes(removal.size_bytes)
    if not yes:
        if as_json or not is_terminal(sys.stdin):
            raise OptionError(
                f"deleting {found.path} ({size}) needs confirmation", "add --yes", code="confirmation_needed"
            )
        click.confirm(f"Delete {found.path} ({size})?", abort=True, err=True)
    freed_bytes = removal.execute()
    _print_change(
        f"Deleted {name}: {size} freed.", "", {"removed": name, "freed_bytes": freed_bytes}, as_json
    )


def _resolver(reference: str) -> Callable[..., Resolved]:
    """Return `resolve_head` if the catalogue lists `reference` as a head, and `resolve` otherwise."""
    from edgespec.store.heads import resolve_head
    from edgespec.store.reference import resolve

    return resolve_head if published_head(reference) else resolve


def _print_change(what: str, remark: str, value: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(value | {"remark": remark})
    else:
        click.echo(printable(what))
        note(remark)


def _catalogued(reference: str) -> ModelEntry | None:
    """Return the catalogue entry for a name, alias or repository, whether or not the model is downloaded."""
    from edgespec.store.catalogue import load_catalogue, user_aliases

    catalogue = load_catalogue()
    text = reference.strip()
    for _ in range(10):
        text = user_aliases().get(text.lower(), text)
    text = text.removeprefix("hf:")
    for name in filter(None, (text, text.rpartition(":")[0])):
        if found := catalogue.find(name):
            return found[0]
        if entry := catalogue.of_repository(name):
            return entry
    return None


def _facts(stop: Stop, reference: str, has_gpu_layers: bool) -> tuple[ModelFacts | None, str]:
    """Load a model and return (facts, ""), or (None, reason) if it cannot be loaded."""
    import edgespec

    options: dict[str, Any] = {"context": _LOOK_CONTEXT_TOKENS, "method": "none"}
    if has_gpu_layers:
        options["gpu_layers"] = 0
    try:
        with (
            ProgressLine(stop) as progress,
            edgespec.load(reference, "none", **options, progress=progress) as runtime,
        ):
            return runtime.target, ""
    except (MemoryBudgetError, BackendMissingError) as error:
        return None, str(error)


def write_name(table: Literal["aliases", "pairs"], name: str, reference: str | None) -> None:
    """Set the reference for a name, or remove the name if `reference` is None. Ignores case.

    Raises:
        ModelNotFoundError: The name to remove does not exist.
        ConfigurationError: The file cannot be changed.
    """
    import difflib
    import tomllib

    from edgespec.options.settings_file import quoted, read_text, write_value
    from edgespec.store.catalogue import user_aliases, user_aliases_path, user_pairs

    names = user_aliases() if table == "aliases" else user_pairs()
    if reference is None and name.lower() not in names:
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        raise ModelNotFoundError(
            f"there is no {'alias' if table == 'aliases' else 'draft model saved for'} {name}",
            f"did you mean {near[0]}?" if near else "`edgespec models list` shows all",
        )
    path = user_aliases_path()
    written = tomllib.loads(read_text(path) or "").get(table, {})
    spelled = next((each for each in written if each.lower() == name.lower()), name)
    write_value(path, (table, spelled), None if reference is None else quoted(reference))
