"""Commands for choosing the model, settings, system prompt, tools and colours.

`/preset` applies a saved system prompt, model and settings, or saves the current ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.chat.saved_chat import Setting
from edgespec.errors import (
    ConfigurationError,
    EdgespecError,
    ModelNotFoundError,
    NotDownloadedError,
    OptionError,
    TemplateError,
)
from edgespec.options.presets import Preset, preset_names, preset_path, read_preset, write_preset
from edgespec.options.settings import SETTINGS as PRESET_SETTINGS
from edgespec.system.files import format_bytes
from edgespec.tools.tool import visible
from edgespec.tui.commands.information import show
from edgespec.tui.commands.results import (
    Action,
    Change,
    Command,
    Context,
    Load,
    Problem,
    Question,
    Result,
    Text,
)
from edgespec.tui.input_syntax import unquoted
from edgespec.tui.numbers import count, rate
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.settings import (
    ALL_LOAD_SETTINGS,
    SCHEMA,
    SETTINGS,
    accepted,
    check_settings,
    default_source,
    default_text,
    load_setting_named,
    parse,
    read_schema,
    setting_named,
    shown,
    with_load_setting,
)
from edgespec.tui.texts import loaded_value, sentences
from edgespec.tui.tool_access import ToolAccess, no_servers_text, server_state

if TYPE_CHECKING:
    from edgespec import AvailableModel
    from edgespec.api.sharing.base import ChatModel
    from edgespec.store.drafts import DraftOption
    from edgespec.store.heads import HeadOption
    from edgespec.store.reference import Resolved

# Maximum number of draft models that /draft lists.
_MAX_CHOICES = 8
# What to type to change the load options that have a command of their own.
_SHORT_COMMANDS = {"draft": "/draft and a name", "context": "/context and a number of tokens"}
_NO_DRAFTS = (
    "No draft models are known for {target}. If you have a much smaller model, type /draft and its name or"
    " path. Without one, replies that repeat text can still be faster, as /why explains."
)
_NO_HEADS = (
    "No draft heads are known for {target}. If you have one, type /set head and the path of its folder."
)
_NO_PRESETS = (
    "There are no presets yet. Type /preset save NAME to save the current system prompt, model and settings"
    " under a name."
)


def _model(context: Context) -> Result:
    """Switch to a model. If only part of a name is given, such as `8b`, list the matching models."""
    typed = unquoted(context.argument)
    if not typed:
        return Action("models", otherwise=lambda: _models(context))
    try:
        return chosen_model(context.runtime, typed)
    except OptionError as error:
        if not isinstance(error.__cause__, ModelNotFoundError):
            raise
        import edgespec

        if not any(is_match(typed, model.reference) for model in edgespec.list_models()):
            raise
        problem = Problem(error)
        return Action("models", typed, otherwise=lambda: problem)


def chosen_model(runtime: ChatModel, reference: str) -> Result:
    """Return the result of choosing a model: switch to it, or download it first.

    Raises:
        OptionError: There is no such model, or its file is unreadable.
    """
    found = _check_known(reference)
    if found is None:
        return Action("download", reference)
    if is_open(found.path, runtime):
        return Text(f"This chat already uses {runtime.target.name}.")
    return Action("switch", reference)


def _check_known(reference: str) -> Resolved | None:
    """Resolve a reference to a model on this machine, or return None if it must be downloaded.

    Raises:
        OptionError: There is no such model, or its file is unreadable.
    """
    # Imported lazily to avoid delaying the first prompt.
    from edgespec.store.reference import resolve

    try:
        return resolve(reference, allow_download=False)
    except NotDownloadedError:
        return None
    except EdgespecError as error:
        raise OptionError(error.what, error.next_step, code=error.code) from error


def _models(context: Context) -> Result:
    """List the models on this machine, and suggest some that can be downloaded."""
    # Imported lazily to avoid delaying the first prompt.
    import edgespec

    runtime = context.runtime
    plan = runtime.plan
    budget_bytes = plan.budget.total_bytes if plan else None
    models = edgespec.list_models(memory=budget_bytes, also=context.model_paths)
    installed = [model for model in models if model.is_installed]
    lines = [_model_line(model, is_used=is_open(model.path, runtime)) for model in installed]
    disturbed = ""
    if any(model.speed and model.speed.is_disturbed for model in models):
        disturbed = "Speeds with a question mark are rough: other programs were busy when they were measured."
    fitting = [
        f"{model.reference} ({format_bytes(model.download_bytes)})"
        for model in models
        if not model.is_installed and model.fits
    ]
    return (
        Text("\n".join(["On this machine:", *lines])),
        Text(disturbed, is_hint=True),
        Text(f"Models to download that fit in memory: {', '.join(fitting)}." if fitting else ""),
        Text("To switch to a model or to download it, type /model and its name.", is_hint=True),
    )


def _model_line(model: AvailableModel, *, is_used: bool) -> str:
    parts = (
        "in use" if is_used else "",
        format_bytes(model.size_bytes) if model.size_bytes else "",
        "" if model.fits else "runs from disk" if model.is_streamed else "too large for this machine",
        speed_text(model),
        f"draft model {model.draft}" if model.draft else "",
    )
    return f"{model.reference}: {', '.join(filter(None, parts))}"


def is_open(path: Path | None, runtime: ChatModel) -> bool:
    """Return whether the chat uses the model at a path."""
    return path is not None and path.absolute() == Path(runtime.target.path).absolute()


def is_match(query: str, name: str) -> bool:
    """Return whether `name` contains all words of `query`."""
    return all(word in name.lower() for word in query.lower().split())


def speed_text(model: AvailableModel) -> str:
    """Return the expected speed, such as `12 tok/s`, or an empty string if it is unknown.

    A question mark is appended if other programs were busy during the measurement.
    """
    if model.speed is None:
        return ""
    return rate(model.speed.fastest_tokens_per_second) + ("?" if model.speed.is_disturbed else "")


def _reload(context: Context, name: str, text: str) -> Result:
    """Reload the model with a new value for a load option, or describe the option if no value is given."""
    changed = context.changed_load_options
    if not text:
        value = f"{name}: {loaded_value(name, context.runtime, changed)}"
        what_to_type = _SHORT_COMMANDS.get(name, f"/set {name} and a value")
        advice = f"To change it, which loads the model again, type {what_to_type}"
        described = sentences(value, ALL_LOAD_SETTINGS[name].help, advice)
        return Text("\n".join((described, *_choices(name, context))))
    check_load_setting(name, text)
    return Load(context.model_name, with_load_setting(changed, name, text))


def _choices(name: str, context: Context) -> list[str]:
    """Return one line per draft model or head, or an empty list for other load options."""
    if name not in ("draft", "head") or (found := _check_known(context.model_name)) is None:
        return []
    # Imported lazily to avoid delaying the first prompt.
    from edgespec.store.drafts import draft_options
    from edgespec.store.heads import head_options
    from edgespec.store.installed import find_installed

    target = context.runtime.target.name
    if name == "head":
        lines = [f"  {_head_line(head)}" for head in head_options(found)]
        return [f"Draft heads for {target}:", *lines] if lines else [_NO_HEADS.format(target=target)]
    drafts = draft_options(found, find_installed(include_embedded=True))
    lines = [f"  {_draft_line(draft)}" for draft in drafts[:_MAX_CHOICES]]
    if len(drafts) > _MAX_CHOICES:
        lines.append(f"  and {count(len(drafts) - _MAX_CHOICES)} more")
    return [f"Draft models for {target}:", *lines] if lines else [_NO_DRAFTS.format(target=target)]


def _draft_line(draft: DraftOption) -> str:
    parts = (
        format_bytes(draft.size_bytes),
        f"expected speed-up {draft.speedup:.1f}x",
        "" if draft.path is not None else "not on this machine",
    )
    return f"{draft.reference}: {', '.join(filter(None, parts))}"


def _head_line(head: HeadOption) -> str:
    if head.problem:
        state = f"cannot be used, because {head.problem}"
    elif head.head is None:
        state = "not on this machine"
    elif head.must_be_named:
        state = "used only if you choose it"
    else:
        state = "on this machine"
    licence = f"licence {head.licence}" if head.licence else ""
    parts = (head.kind if head.reference else "", head.expectation, licence, state)
    return f"{head.name}: {', '.join(filter(None, parts))}"


def check_load_setting(name: str, text: str) -> None:
    """Raise OptionError if `text` is invalid for this load option, or names an unknown draft model."""
    with_load_setting({}, name, text)
    if name == "draft" and text not in ("auto", "default", "none"):
        _check_known(text)


def _draft(context: Context) -> Result:
    return _reload(context, "draft", unquoted(context.argument))


def _context(context: Context) -> Result:
    return _reload(context, "context", context.argument)


def _set(context: Context) -> Result:
    """Handle `/set NAME VALUE`: change the setting, or describe it if no value is given.

    Ollama's syntax, such as `/set parameter temperature 0.5`, is also accepted.
    """
    word, _, text = context.argument.partition(" ")
    if not word:
        return Action("settings", otherwise=lambda: show(context))
    if word == "system":
        return _system_prompt(context.chat, text.strip())
    # An equals sign may follow the name. Others are part of the value.
    argument = re.sub(r"^([^\s=]+)\s*=", r"\1 ", context.argument.removeprefix("parameter "))
    word, _, text = argument.partition(" ")
    if (load_name := load_setting_named(word)) is not None:
        return _reload(context, load_name, text.strip())
    name, settings, text = setting_named(word), dict(context.chat.settings), text.strip()
    if not text:
        default = f"{default_text(name, context.runtime, settings)} ({default_source(name, context.runtime)})"
        value = shown(settings[name]) if name in settings else default
        return Text(sentences(f"{name}: {value}", SETTINGS[name].hint))
    if text.lower() in ("default", "none", "off") and not (name == "method" and text == "none"):
        settings.pop(name, None)
        note = f"{name} is back to its default: {default_text(name, context.runtime, settings)}."
    else:
        settings[name] = parse(name, unquoted(text))
        note = f"{name} is now {shown(settings[name])}."
    return _changed(context, settings, note)


def _schema(context: Context) -> Result:
    settings = dict(context.chat.settings)
    if not context.argument:
        return Text(f"schema: {settings[SCHEMA]}" if SCHEMA in settings else "No schema is set.")
    if context.argument.lower() in ("none", "off"):
        settings.pop(SCHEMA, None)
        return _changed(context, settings, "The schema was removed.")
    settings[SCHEMA] = read_schema(unquoted(context.argument))
    return _changed(context, settings, f"Replies will now match the schema in {context.argument}.")


def _think(context: Context) -> Result:
    settings = dict(context.chat.settings)
    if not context.argument:
        value = shown(settings["thinking"]) if "thinking" in settings else "auto, the model's default"
        return Text(f"Reasoning: {value}. To change it, type /think on or /think off.")
    value = str(parse("thinking", context.argument.lower()))
    settings.pop("thinking", None)
    if value == "auto":
        note = "From your next message on, the model decides whether to reason before it answers."
        return _changed(context, settings, note)
    _check_thinking_switch(context.runtime)
    settings["thinking"] = value
    negation = "" if value == "on" else "not "
    note = f"From your next message on, the model will be asked {negation}to reason."
    return _changed(context, settings, note)


def _check_thinking_switch(runtime: ChatModel) -> None:
    """Raise OptionError if the model's chat template has no option that turns reasoning on or off."""
    switch = False
    # Treat a broken template as one without the option. The next message reports the template's error.
    with suppress(TemplateError):
        switch = runtime.has_thinking_switch()
    if not switch:
        raise OptionError(
            f"Reasoning cannot be turned on or off for the model {runtime.target.name}",
            "Models that support /think include Qwen 3, GLM 4.5 and SmolLM3",
            code="command_unavailable",
        )


def _changed(context: Context, settings: Mapping[str, Setting], note: str) -> Result:
    """Return a change that applies these settings, and reloads the model if they require it.

    Raises:
        OptionError: The models do not support the settings.
    """
    needed = check_settings(settings, context.runtime)

    def apply(chat: OpenChat) -> None:
        chat.settings = dict(settings)

    change = Change(apply, note)
    return (
        (change, Load(context.model_name, {**context.changed_load_options, **needed})) if needed else change
    )


def _system(context: Context) -> Result:
    return _system_prompt(context.chat, context.argument)


def _system_prompt(chat: OpenChat, argument: str) -> Result:
    if not argument:
        return Action("system", otherwise=lambda: Text(f"System prompt: {chat.system or 'none'}"))
    return system_change(chat, None if argument.lower() == "none" else unquoted(argument))


def system_change(chat: OpenChat, system: str | None) -> Change:
    """Return a change to the system prompt, which takes effect with the next message."""

    def apply(chat: OpenChat) -> None:
        chat.system = system

    which = "use the new system prompt" if system else "not use a system prompt"
    text = "" if system == chat.system else f"Your next message will {which}."
    return Change(apply, text, in_plain=f"System prompt: {system or 'none'}")


def _tools(context: Context) -> Result:
    word = context.argument.lower()
    if word not in ("", "on", "off"):
        raise OptionError(
            f"Unknown argument {context.argument!r} for /tools", "Type /tools, /tools on or /tools off"
        )
    if word == "off":
        return Action("stop_tools"), Text("Tools are off.")
    if not context.tools.read_servers():
        return Text(no_servers_text())
    if word == "on":
        return Action("start_tools")
    return Action("tools", otherwise=lambda: _servers(context.tools))


def _servers(tools: ToolAccess) -> Result:
    lines = []
    for name, server in tools.toolbox.servers.items():
        lines.append(f"Server {name}: {server_state(server)}")
        for tool in server.tools:
            description = " ".join(visible(tool.description).split())
            allowed = " (called without asking)" if tools.is_always_allowed(tool) else ""
            lines.append(f"  {visible(tool.name)}: {description}{allowed}")
    hint = "To start all servers, type /tools on. To stop them, type /tools off."
    return Text("\n".join(lines)), Text(hint, is_hint=True)


def _preset(context: Context) -> Result:
    """Apply the named preset, or let the user choose one. `save NAME` saves a preset."""
    word, _, name = context.argument.partition(" ")
    if word == "save":
        return _save(context, name.strip())
    if context.argument:
        return _apply_preset(context)
    names = preset_names()
    if not names:
        return Text(_NO_PRESETS)
    hint = "To use one, type /preset and its name."
    return Action("presets", otherwise=lambda: (Text("\n".join(names)), Text(hint, is_hint=True)))


def _apply_preset(context: Context) -> Result:
    """Apply the preset that the argument names, starting with the next message.

    Raises:
        OptionError: There is no such preset, its file is invalid, or the models do not support its settings.
    """
    name = context.argument
    values = _values(name, context.chat)
    changed = context.changed_load_options
    needed = values.loading | check_settings(values.settings, context.runtime)

    def apply(chat: OpenChat) -> None:
        chat.settings, chat.system = dict(values.settings), values.system

    change = Change(apply, f"The preset {name} takes effect with your next message.")
    if values.target and values.target != context.model_name:
        try:
            found = chosen_model(context.runtime, values.target)
        except OptionError as error:
            return change, Problem(error)
        if found == Action("switch", values.target) and needed:
            return change, Load(values.target, needed, is_other=True)
        if found == Action("download", values.target) and needed:
            again = f"After the download, type /preset {name} again to use all of its settings."
            return change, Text(again, is_hint=True), found
        if isinstance(found, Action):
            return change, found
    if any(name not in changed or changed[name] != value for name, value in needed.items()):
        return change, Load(context.model_name, {**changed, **needed})
    return change


class _PresetValues(NamedTuple):
    """The values that a preset sets in a chat.

    Attributes:
        settings: All of the chat's settings once the preset is applied.
        system: The system prompt.
        target: A reference to the model. Empty if the preset names none.
        loading: The options to load the model with.
    """

    settings: dict[str, Setting]
    system: str | None
    target: str
    loading: dict[str, Any]


def _values(name: str, chat: OpenChat) -> _PresetValues:
    """Read a preset for use in a chat. Raises OptionError if the preset is invalid or missing."""
    try:
        chosen = read_preset(name)
    except ConfigurationError as error:
        raise OptionError(error.what, error.next_step, code=error.code) from error
    given = dict(chosen.settings)
    system, target = given.pop("system", None), str(given.pop("target", ""))
    in_chat = {key: _as_chat_value(given.pop(key)) for key in SETTINGS if key in given}
    settings, problems = accepted(in_chat)
    if problems:
        raise OptionError(f"The preset {name} was not applied: {problems[0]}", f"Edit {preset_path(name)}")
    if SCHEMA in chat.settings:
        settings[SCHEMA] = chat.settings[SCHEMA]
    loading = {
        key: ALL_LOAD_SETTINGS[key].check(key, value)
        for key, value in given.items()
        if key in ALL_LOAD_SETTINGS
    }
    return _PresetValues(settings, system or None, target, loading)


def _as_chat_value(value: object) -> Setting:
    if isinstance(value, tuple):
        return list(value)
    assert isinstance(value, str | int | float | bool)
    return value


def _save(context: Context, name: str) -> Result:
    """Save the system prompt, model and settings as a preset. Ask before replacing an existing one."""
    if not name:
        raise OptionError("The preset needs a name", "Type /preset save NAME")
    chat = context.chat
    settings: dict[str, object] = {"system": chat.system} if chat.system else {}
    settings["target"] = context.model_name
    changed = context.changed_load_options
    settings |= {key: value for key, value in changed.items() if key in PRESET_SETTINGS and value is not None}
    settings |= {key: value for key, value in chat.settings.items() if key != SCHEMA}
    preset = Preset(name, settings)
    if not preset_path(name).exists():
        return _written(preset, chat)
    return Question(
        f"Replace the existing preset {name}?",
        "Replace",
        lambda: _written(preset, chat),
        declined="The preset was not saved.",
    )


def _written(preset: Preset, chat: OpenChat) -> Text:
    path: Path = write_preset(preset)
    omitted = (
        " The schema was not saved, because presets cannot contain one." if SCHEMA in chat.settings else ""
    )
    return Text(f"Saved the preset {preset.name} in {path}.{omitted} To use it, type /preset {preset.name}.")


def _colours(_context: Context) -> Result:
    return Action("colours")


def _theme(context: Context) -> Result:
    # Imported lazily, because the plain chat does not need Textual.
    from edgespec.tui.themes import find_theme, theme_names, themes_folder

    if not context.argument:
        used = context.preferences.theme
        names = ", ".join(f"{name} (in use)" if name == used else name for name in theme_names())
        return Text(
            f"Themes: {names}. Type /theme NAME to choose one. Your own themes are TOML files in"
            f" {themes_folder()}."
        )
    try:
        find_theme(context.argument)
    except ConfigurationError as error:
        raise OptionError(error.what, error.next_step, code=error.code) from error
    return Action("theme", context.argument)


COMMANDS = (
    Command("model", "[name]", "choose or download a model", _model, ("models",), slow="reads"),
    Command("set", "[name value]", "show the settings, or change one", _set, ("settings",)),
    Command("draft", "[name|auto|none]", "change the draft model; loads the model again", _draft),
    Command("context", "[tokens]", "change the context length; loads the model again", _context),
    # This command is slow because it starts the process that renders the chat template.
    Command(
        "think",
        "[on|off|auto]",
        "choose whether the model thinks before it answers",
        _think,
        slow="reads",
    ),
    Command("schema", "[file|none]", "get replies as JSON that matches a schema in a file", _schema),
    Command("system", "[text|none]", "show or change the system prompt", _system),
    Command(
        "tools",
        "[on|off]",
        "choose the tools that the model can use (MCP servers)",
        _tools,
        slow="reads",
    ),
    Command(
        "preset",
        "[name|save name]",
        "use or save a system prompt, model and settings",
        _preset,
        slow="writes",
    ),
)
APPEARANCE = (
    Command(
        "colours",
        "",
        "colour the words that were guessed correctly",
        _colours,
        ("colors", "origin"),
        instead="Type /why to see how many guesses were accepted",
    ),
    Command(
        "theme",
        "[name]",
        "list the colour themes, or choose one",
        _theme,
        instead="The plain chat uses the colours of your terminal",
    ),
)
