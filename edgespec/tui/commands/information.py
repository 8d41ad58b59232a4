"""Commands that say what the chat uses and how fast it is."""

from __future__ import annotations

from edgespec.errors import OptionError
from edgespec.tui.commands.results import Action, Command, Context, Result, RunningRace, Table, Text
from edgespec.tui.texts import memory_rows, show_rows
from edgespec.tui.why import why_text

__all__ = ["SHOW", "SPEED", "show"]


def show(context: Context) -> Result:
    """Return the models, the speed-up and the settings."""
    return Table(
        "Model and settings", show_rows(context.runtime, context.chat, context.method, context.stats)
    )


def _details(_context: Context) -> Result:
    return Action("details")


def _why(context: Context) -> Result:
    text = why_text(context.runtime, context.method, context.stats, context.chat.settings)
    return Text(text, title="Why this speed")


def _race(context: Context) -> Result:
    # Imported only when used, because this import would delay the first screen.
    from edgespec.tui.race import race_method, start_race

    if context.writing:
        raise OptionError(
            "The reply is not finished yet",
            "Press Esc to stop it, then type /race again",
            code="command_unavailable",
        )
    method = race_method(context.runtime, context.chat)
    return RunningRace(method, start_race(context.model_thread, context.chat, method, context.argument))


def _memory(context: Context) -> Result:
    return Table("Memory", memory_rows(context.runtime.memory()))


SHOW = (Command("show", "", "show the model, the speed-up and all settings", show, ("info",)),)
SPEED = (
    Command(
        "details",
        "",
        "show or hide the speed and memory of the last reply",
        _details,
        ("stats",),
        instead="Type /why to see the speed of the last reply, or /memory to see the memory use",
    ),
    # Looking for draft models reads the folders of other programs.
    Command("why", "", "explain why the last reply was fast or slow", _why, slow="reads"),
    Command("race", "[message]", "compare a reply with and without the speed-up", _race),
    Command("memory", "", "show how much memory is used, and for what", _memory),
)
