"""`edgespec chat`: chat with a model in the terminal."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from edgespec.cli.failures import DONE, INTERRUPTED, usage_error
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.options import (
    LOAD_NAMES,
    METHOD_NAMES,
    REPLY_NAMES,
    WORKER_NAMES,
    declared_options,
    pick,
    preset_option,
)
from edgespec.cli.screen import is_terminal
from edgespec.cli.settings import ignore_setting, preset_of
from edgespec.options.reply_options import REPLY_OPTIONS
from edgespec.options.settings import SETTINGS

if TYPE_CHECKING:
    from edgespec import Preview
    from edgespec.api.sharing.base import ChatModel
    from edgespec.chat.saved_chat import ModelReferences
    from edgespec.store.download import Progress
    from edgespec.tui.worker import Load

__all__ = ["command"]

# Settings of a chat that are also options for loading a model.
_METHOD_SETTINGS = tuple(name for name in METHOD_NAMES if name in SETTINGS)
# The reply options that the chat can show and change. `schema` is included, because `/schema` changes it.
_REPLY_NAMES = tuple(name for name in REPLY_NAMES if REPLY_OPTIONS[name].in_chat or name == "schema")


@click.command(
    "chat",
    cls=HelpfulCommand,
    params=declared_options(
        *("target", "draft", "system", *_REPLY_NAMES, *LOAD_NAMES, *WORKER_NAMES),
        defaults={"prefix_cache": "disk", "remember": True},
    ),
    short_help="Chat with a model in the terminal.",
    examples=(
        "edgespec chat",
        "edgespec chat 8b-q4",
        "edgespec chat --resume",
        "edgespec chat --preset reviewer",
        "edgespec chat --target 70b-q4 --draft 8b-q4 --memory 48GiB",
        'edgespec chat --target ./model.gguf --draft none --system "Be brief."',
    ),
)
@preset_option
@click.argument("model", required=False)
@click.option(
    "--resume", metavar="[ID|TITLE]", is_flag=False, flag_value="last",
    help="Continue the last chat, or the chat with this ID or title.",
)  # fmt: skip
@click.option(
    "--plain", is_flag=True,
    help="Chat line by line, without colours or a full-screen display, for example with a screen reader."
         " This is automatic in pipes and in terminals that cannot show the full-screen chat.",
)  # fmt: skip
@click.option(
    "--no-mouse",
    is_flag=True,
    help="Do not capture the mouse, so that you can select text as usual in your terminal.",
)
@click.option("--tools", is_flag=True, help="Start your MCP servers, so that the model can call their tools.")
@click.option(
    "--light/--dark", default=None, help="Use light or dark colours. [default: as in the last chat]"
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str | None,
    system: str | None,
    resume: str | None,
    plain: bool,
    no_mouse: bool,
    tools: bool,
    light: bool | None,
    **options: Any,
) -> int:
    """Chat with a model in the terminal. Press F1 in the chat to see its keys and commands.

    The chat is saved continuously, so nothing is lost if it is interrupted. --resume reopens the last chat,
    and /continue finishes an interrupted reply.

    `edgespec chat MODEL` is short for `edgespec chat --target MODEL`, and so is `edgespec run MODEL`. With a
    prompt, `edgespec run MODEL PROMPT` prints one reply and exits, like `edgespec generate`.

    If you name no model, a saved chat opens with its own models. A new chat opens with the default that you
    chose in the list of models (F9), or else with the models that you used last. The first chat uses SmolLM2,
    a small model that `scripts/setup` installs, or a tiny demo model if that is missing.
    """
    if resume is not None:
        _check_saved(resume)
    are_remembered, changed, fallback_note = _choose_models(ctx, options, model, resume)
    if sys.stdin is None:
        raise click.UsageError("the chat needs input, but stdin is closed", ctx)
    is_plain = plain or not _has_screen()

    from edgespec.api.sharing.chat_sharing import ChatSharing
    from edgespec.chat.saved_chat import ModelReferences
    from edgespec.errors import CancelledError, EdgespecError
    from edgespec.options.settings import load_arguments_for_another_model
    from edgespec.system.installation import chat_command
    from edgespec.tui.app import run_chat
    from edgespec.tui.model_choice import lasting, load_available, saved_options
    from edgespec.tui.plain_run import run_plain_chat

    sharing = ChatSharing()

    def load(progress: Progress) -> ChatModel:
        arguments = pick(options, (*LOAD_NAMES, *WORKER_NAMES))
        try:
            return load_available(
                lambda: sharing.load(_with_changes(arguments, changed), progress), changed, saved
            )
        except EdgespecError as error:
            if not are_remembered or isinstance(error, CancelledError):
                raise
            advice = " or ".join(filter(None, (error.next_step, "open another model: edgespec chat MODEL")))
            raise EdgespecError(error.what, advice, code=error.code) from error

    saved = saved_options(changed)
    models = ModelReferences(lasting(options["target"]), lasting(options["draft"]), saved)

    def load_other(
        reference: str, changed: Mapping[str, Any] | None = None, kept: Mapping[str, Any] | None = None
    ) -> Load:
        if changed is not None and reference == models.target:
            arguments = pick(options, (*LOAD_NAMES, *WORKER_NAMES))
        else:
            arguments = load_arguments_for_another_model(pick(options, LOAD_NAMES))
        arguments = _with_changes({**arguments, "target": reference}, {**(kept or {}), **(changed or {})})
        return lambda progress: sharing.load(arguments, progress)

    def plan_other(reference: str, planned: Mapping[str, Any]) -> Preview:
        import edgespec

        arguments = load_arguments_for_another_model(pick(options, LOAD_NAMES))
        return edgespec.plan(reference, **_with_changes(arguments, planned))

    settings = {
        name: list(options[name]) if isinstance(options[name], tuple) else options[name]
        for name in _REPLY_NAMES
        if name not in LOAD_NAMES and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    # A resumed chat has its own settings, so replace only those given explicitly for this run.
    overrides = {
        name: value
        for name, value in {**settings, **pick(options, _METHOD_SETTINGS), "system": system}.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    asked: dict[str, Any] = {
        "models": models,
        "changed": changed,
        "fallback_note": fallback_note,
        "system": system,
        "settings": settings,
        "overrides": overrides,
        "resume": resume,
        "load_other": load_other,
        "plan_other": plan_other,
        "tools": tools,
        "sharing": sharing,
    }
    if is_plain:
        ended = run_plain_chat(load, **asked)
    else:
        looks = {
            "light": light,
            "mouse": not no_mouse,
            "remember": options["remember"],
        }
        ended = run_chat(load, **asked, **looks)
    if ended.signalled:
        return INTERRUPTED
    if ended.resume:
        preset = preset_of(ctx)
        words = [] if preset is None else ["--preset", preset]
        words += ["--resume", *([ended.resume] if ended.resume != "last" else [])]
        click.echo(f"To continue this chat: {chat_command()} {shlex.join(words)}", err=is_plain)
    return DONE


def _with_changes(arguments: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for loading a model, with the load options that were changed in the chat."""
    # If the user has set `exactness` in the chat, it overrides `--exact` as well.
    exact = bool(arguments.get("exact")) and "exactness" not in changed
    return {**arguments, "exact": exact, **changed}


class _Choice(NamedTuple):
    """The models that a chat opens with, other than `options["target"]` and `options["draft"]`.

    Attributes:
        are_remembered: Whether the models come from an earlier chat.
        changed: Load options of the chat to resume.
        fallback_note: Why the chat opens with other models than it should. Empty if it does not.
    """

    are_remembered: bool
    changed: dict[str, Any]
    fallback_note: str


def _choose_models(
    ctx: click.Context, options: dict[str, Any], model: str | None, resume: str | None
) -> _Choice:
    """Choose the target and the draft model, unless the user specified them on the command line.

    A saved chat uses its own models. A new chat uses the models that were used last, unless the settings
    specify others.
    """
    source = ctx.get_parameter_source("target")
    if model is not None:
        if source is ParameterSource.COMMANDLINE:
            raise usage_error(f"both {model!r} and --target name a model", "omit one of them", ctx)
        options["target"] = model
        ignore_setting(ctx, "target")
        return _Choice(False, {}, "")
    if source is ParameterSource.COMMANDLINE:
        return _Choice(False, {}, "")
    from edgespec.tui.model_choice import load_options_of, models_here
    from edgespec.tui.texts import missing_files_text

    wanted = None if resume is None else _models_of_chat(resume)
    models = None if wanted is None else models_here(wanted)
    note = ""
    if models is None and source is ParameterSource.DEFAULT:
        wanted = _models_used_last()
        models = models_here(wanted)
        if models is None and wanted.target:
            note = (
                f"The model that you used last, {wanted.target}, was not found, so this chat uses"
                f" {options['target']}. To choose another model, type /model."
            )
    if models is None or wanted is None:
        return _Choice(False, {}, note)
    options["target"] = models.target
    ignore_setting(ctx, "target")

    def is_named(name: str) -> bool:
        return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE

    def without_named(references: ModelReferences) -> ModelReferences:
        """Return the references without those that options on the command line replace."""
        kept = {name: value for name, value in references.options.items() if not is_named(name)}
        if is_named("exact"):
            kept.pop("exactness", None)
        return references._replace(draft="" if is_named("draft") else references.draft, options=kept)

    wanted, models = without_named(wanted), without_named(models)
    options["draft"] = models.draft or options["draft"]
    changed = {name: value for name, value in load_options_of(models).items() if name != "draft"}
    return _Choice(True, changed, missing_files_text(wanted, models))


def _check_saved(wanted: str) -> None:
    """Raise ChatFileError if there is no saved chat with this ID or title.

    If there are no chats yet, `last` opens a new one.
    """
    from edgespec.chat.store import ChatStore, find_chat
    from edgespec.cli.chats import chat_not_found
    from edgespec.errors import ChatFileError

    try:
        chats = ChatStore().list()
    except ChatFileError:
        # The chat reports this error, which does not prevent a conversation.
        return
    if wanted != "last" and find_chat(chats, wanted) is None:
        raise chat_not_found(chats, wanted)


def _models_of_chat(wanted: str) -> ModelReferences | None:
    from edgespec.chat.store import ChatStore, find_chat
    from edgespec.errors import ChatFileError

    # Ignore a damaged file here. The chat reports the damage when it opens the file.
    with suppress(ChatFileError):
        store = ChatStore()
        if (found := find_chat(store.list(), wanted)) is not None:
            return store.load(found.id).models
    return None


def _models_used_last() -> ModelReferences:
    from edgespec.chat.saved_chat import ModelReferences
    from edgespec.chat.store import ChatStore
    from edgespec.tui.preferences import Preferences, preferences_path

    preferences = Preferences.read(preferences_path(ChatStore()))
    return ModelReferences(preferences.target, preferences.draft)


def _has_screen() -> bool:
    """Return whether the full-screen chat can run, either in a capable terminal or in a browser."""
    if os.environ.get("TEXTUAL_DRIVER"):
        return True
    is_dumb = os.name == "posix" and os.environ.get("TERM", "") in ("", "dumb")
    return is_terminal(sys.stdin) and is_terminal(sys.stdout) and not is_dumb
