"""The inputs and results of slash commands.

A command is a function that takes a `Context` and returns a `Result`. It neither prints nor draws anything:
`screen_commands.py` shows results in the full-screen chat, and `plain_commands.py` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from concurrent.futures import Future

    from edgespec import MethodReport, Stats
    from edgespec.api.sharing.base import ChatModel
    from edgespec.bench.race import Race
    from edgespec.chat.store import StoredChat
    from edgespec.chat.tool_calls.calls import ToolCall
    from edgespec.errors import EdgespecError
    from edgespec.tui.archive import Archive
    from edgespec.tui.open_chat import OpenChat, RunningTurn
    from edgespec.tui.preferences import Preferences
    from edgespec.tui.tool_access import ToolAccess
    from edgespec.tui.worker import ModelThread


@dataclass(frozen=True, slots=True)
class Context:
    """The state of the chat in which a command was typed.

    Attributes:
        argument: The text after the command name.
        chat: The open chat.
        new_chat: An empty chat with the system prompt and settings given on the command line.
        runtime: The loaded models.
        model_name: Reference to the loaded model, as saved in presets.
        changed_load_options: Load options that the user has changed in the chat.
        model_paths: Paths of the models that this program has loaded.
        model_thread: The thread that runs the model.
        method: Drafting method of the current or last reply, or the default method.
        stats: Statistics of that reply, or None if there is none.
        writing: Whether a reply is being generated.
        archive: The saved chats.
        tools: The tools that the model can call.
        preferences: The appearance of the full-screen chat.
        list_hint: How to open the list of chats, as a sentence without its full stop.
    """

    argument: str
    chat: OpenChat
    new_chat: OpenChat
    runtime: ChatModel
    model_name: str
    changed_load_options: Mapping[str, Any]
    model_paths: Sequence[str]
    model_thread: ModelThread
    method: MethodReport
    stats: Stats | None
    writing: bool
    archive: Archive
    tools: ToolAccess
    preferences: Preferences
    list_hint: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text to show.

    Attributes:
        text: The text. If it is empty, nothing is shown.
        title: A heading. The full-screen chat shows text with a heading in a box.
        in_plain: The text for the plain chat, if it differs.
        is_hint: Whether the text is a hint, not the command's output. The plain chat prints hints to stderr.
    """

    text: str
    title: str = ""
    in_plain: str = ""
    is_hint: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a label and a value, under a heading."""

    title: str
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Nothing:
    """The result of a valid command that has nothing to do.

    Attributes:
        reason: Why there is nothing to do, as a sentence without its full stop.
        next_step: What the user can do. The full-screen chat shows only the reason, and only briefly.
    """

    reason: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Problem:
    """An error that does not invalidate the rest of the result. Other errors are raised."""

    error: EdgespecError


@dataclass(frozen=True, slots=True)
class Change:
    """A change to the open chat, which is saved afterwards.

    Attributes:
        apply: Changes the chat.
        text: Confirms the change. Empty if the full-screen chat shows the change elsewhere.
        in_plain: The confirmation for the plain chat, if it differs.
        is_brief: Whether the full-screen chat shows the confirmation only briefly, after saving.
    """

    apply: Callable[[OpenChat], None]
    text: str
    in_plain: str = ""
    is_brief: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """Another chat to open: a saved one, or a new one with a note that says where its messages come from."""

    chat: OpenChat | StoredChat
    note: str = ""


@dataclass(frozen=True, slots=True)
class Generate:
    """A reply to generate once no other reply is being generated.

    Attributes:
        start: Returns the turn to start in the open chat, the tool calls to make first, or None to do
            nothing.
        command: The command that asks for the reply. It is run again if another model must be loaded first.
    """

    start: Callable[[OpenChat], RunningTurn | Sequence[ToolCall] | None]
    command: str


@dataclass(frozen=True, slots=True)
class Load:
    """A model on this machine to load with changed load options.

    Attributes:
        reference: A reference to the model.
        changed: All load options that the user has changed.
        is_other: Whether this is another model. If so, it keeps the options changed before that suit it.
    """

    reference: str
    changed: Mapping[str, Any]
    is_other: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """Text to copy to the clipboard, or to print in the plain chat. `name` describes it in confirmations."""

    text: str
    name: str


@dataclass(frozen=True, slots=True)
class Question:
    """A yes-or-no question.

    Attributes:
        question: The question.
        confirm: Label of the confirmation button.
        then: Returns the result if the user agrees. Called outside the event loop, so it may write files.
        declined: What the plain chat prints if the user declines.
    """

    question: str
    confirm: str
    then: Callable[[], Result]
    declined: str


@dataclass(slots=True)
class RaceProgress:
    """Progress of a race, written by the model thread and read by the UI."""

    description: str = "waiting for the model"
    fraction: float = 0.0

    def report(self, description: str, fraction: float) -> None:
        self.description, self.fraction = description, fraction


@dataclass(frozen=True, slots=True)
class RunningRace:
    """A race that is running in the model thread.

    Attributes:
        method: The method that races against plain decoding.
        prompt: The message to which both reply.
        race: The future of the race.
        progress: The progress of the race.
    """

    method: str
    prompt: str
    race: Future[Race]
    progress: RaceProgress


@dataclass(frozen=True, slots=True)
class Action:
    """Something that the chat itself does, such as opening a dialog or quitting.

    Attributes:
        name: Name of the action, a key in each chat's table of actions.
        value: The argument of the action, such as the reference to a model.
        otherwise: Returns the result for a chat that does not support this action.
    """

    name: str
    value: str = ""
    otherwise: Callable[[], Result] | None = None


_Part: TypeAlias = (
    Text
    | Table
    | Nothing
    | Problem
    | Change
    | Open
    | Generate
    | Load
    | Copy
    | Question
    | RunningRace
    | Action
)
Result: TypeAlias = _Part | tuple[_Part, ...]
"""One or more values returned by a command. The chat shows or carries out each of them in order."""


def all_of(result: Result) -> tuple[_Part, ...]:
    """Return the parts of a result."""
    return result if isinstance(result, tuple) else (result,)


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command.

    Attributes:
        name: The name without the slash.
        arguments: The arguments, as shown in the help.
        help: What the command does.
        run: The function. Raises OptionError if the argument is invalid.
        aliases: Other names for the command.
        slow: Whether the command `reads` or `writes` slowly, so that the full-screen chat runs it in a
            thread. The program can exit during a read, but waits for a write to finish. Empty if it is fast.
        in_plain: What the command does in the plain chat, if that differs.
        instead: What to use in the plain chat if it does not have this command. Empty if it does.
    """

    name: str
    arguments: str
    help: str
    run: Callable[[Context], Result]
    aliases: tuple[str, ...] = ()
    slow: Literal["", "reads", "writes"] = ""
    in_plain: str = ""
    instead: str = ""

    @property
    def usage(self) -> str:
        """The command as typed, with its arguments."""
        return f"/{self.name} {self.arguments}".rstrip()
