"""The list of models: on this machine, in the catalogue and on Hugging Face.

It can change the setting `chat.target`, the model that new chats open with.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

import edgespec
from edgespec.errors import ConfigurationError, EdgespecError, OptionError
from edgespec.loading.constants import MEASURING_BYTES
from edgespec.options.settings_file import quoted, read_text, settings_path, write_value
from edgespec.system.files import format_bytes
from edgespec.tui.background import CallThread, in_thread
from edgespec.tui.commands.setup import is_match, is_open, speed_text
from edgespec.tui.downloads import Download, Downloads
from edgespec.tui.model_choice import plan_kept
from edgespec.tui.numbers import rate
from edgespec.tui.screens.help import MODEL_LIST_PART
from edgespec.tui.texts import drafter_names, labelled_drafters, sentences

if TYPE_CHECKING:
    from edgespec import AvailableModel, MemoryPlan, Preview
    from edgespec.api.sharing.base import ChatModel
    from edgespec.tui.worker import PlanModel

_SEARCH_DELAY_SECONDS = 0.5
_MIN_SEARCHED_CHARACTERS = 2
_TICK_SECONDS = 0.5
# Seconds for which a row must be highlighted before its model is planned, so that moving through the list
# stays fast.
_PLAN_DELAY_SECONDS = 0.3
# Minimum terminal width, in columns, at which the dialog's border lists more than two keys.
_WIDE_COLUMNS = 64
_SETTING = ("chat", "target")
_PLACES = {
    "embedded": "included in edgespec: a toy model for offline use",
    "hub": "in the Hugging Face cache",
    "ollama": "stored by Ollama",
    "lmstudio": "stored by LM Studio",
    "path": "a file or folder of yours",
    "catalogue": "on Hugging Face",
    "search": "on Hugging Face",
}
# Each column's width, and the minimum row width at which it is shown, both in cells.
_COLUMNS = {"size": (12, 0), "fits": (11, 46), "speed": (14, 58), "draft": (28, 92)}


class ModelsScreen(ModalScreen["AvailableModel | None"]):
    """Dialog for choosing a model. Its result is the model to use or download, or None if the user cancels.

    Args:
        runtime: The loaded model, whose memory budget also applies to the other models.
        plan_model: Plans a model on this machine, given its reference and load options.
        paths: Paths of models to list in addition to those that edgespec finds.
        kept: Load options that the next model keeps if they suit it.
        downloads: The downloads whose progress the list shows. Enter on a running download stops it.
        is_writing: Whether a reply is being generated. If so, the machine's speed cannot be measured.
        typed: Initial text of the filter.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f9,ctrl+c", "dismiss", "Close", show=False),
        Binding("down", "move('cursor_down')", show=False, priority=True),
        Binding("up", "move('cursor_up')", show=False, priority=True),
        Binding("pagedown", "move('page_down')", show=False, priority=True),
        Binding("pageup", "move('page_up')", show=False, priority=True),
        Binding("ctrl+s", "measure", show=False, priority=True),
        Binding("ctrl+d", "use_as_default", show=False, priority=True),
        Binding("f1", f"app.help('{MODEL_LIST_PART}')", show=False),
    ]

    def __init__(
        self,
        runtime: ChatModel,
        plan_model: PlanModel,
        downloads: Downloads,
        *,
        paths: Sequence[str],
        kept: Mapping[str, Any],
        is_writing: bool,
        typed: str = "",
    ) -> None:
        super().__init__()
        self._paths, self._kept = paths, kept
        self._plan_model = plan_model
        self._planning = CallThread()
        self._plans: dict[str, Preview] = {}
        self._runtime, self._downloads, self._is_writing = runtime, downloads, is_writing
        plan = runtime.plan
        self._budget_bytes = plan.budget.total_bytes if plan else None
        self._models: Sequence[AvailableModel] | None = None
        self._found: Sequence[AvailableModel] = ()
        self._hub_note = "Type at least two letters to search."
        self._shown: dict[str, AvailableModel] = {}
        self._message = ""
        self._default = default_for_chats()
        self._left = Event()
        self._filter = Input(typed, placeholder="Filter, or search on Hugging Face", compact=True)
        self._list = OptionList(compact=True)
        self._details = Static(classes="hint")

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -large", id="models-dialog") as dialog:
            dialog.border_title = "Models"
            yield self._filter
            yield self._list
            yield self._details

    def on_mount(self) -> None:
        self._filter.focus()
        self._list.can_focus = False
        self.set_interval(_TICK_SECONDS, self._refresh_downloads)
        self._list_models()

    def on_unmount(self) -> None:
        self._left.set()

    def on_resize(self, event: events.Resize) -> None:
        wide = " · Ctrl+D makes it the default · F1 help" if event.size.width >= _WIDE_COLUMNS else ""
        self.query_one(".dialog").border_subtitle = f"Enter chooses{wide} · Esc closes"
        self.call_after_refresh(self._show)

    @work(exclusive=True, group="list")
    async def _list_models(self) -> None:
        is_first = self._models is None
        try:
            self._models = await in_thread(
                lambda: edgespec.list_models(memory=self._budget_bytes, also=self._paths)
            )
        except EdgespecError as error:
            self._message = sentences(error.what, error.next_step)
            self._models = ()
        if is_first:
            # Until now, the list contained only downloads, so clear any highlight on one of them.
            self._list.highlighted = None
        self._plans.clear()
        self._show()

    @on(Input.Changed)
    def _filter_changed(self) -> None:
        self._message = ""
        self._list.highlighted = None
        self._search(self._query)
        self._show()

    @property
    def _query(self) -> str:
        """The text of the filter, without the leading slash that starts a search in other programs."""
        return self._filter.value.strip().removeprefix("/")

    @work(exclusive=True, group="search")
    async def _search(self, text: str) -> None:
        self._found = ()
        if len(text) < _MIN_SEARCHED_CHARACTERS:
            self._hub_note = "Type at least two letters to search."
            self._show()
            return
        self._hub_note = "Searching…"
        self._show()
        await asyncio.sleep(_SEARCH_DELAY_SECONDS)
        try:
            self._found = await in_thread(lambda: edgespec.search_models(text, memory=self._budget_bytes))
            self._hub_note = "" if self._found else "Nothing was found."
        except EdgespecError as error:
            self._hub_note = sentences(error.what, error.next_step)
        self._show()

    def _show(self) -> None:
        """Show the models that match the filter. Keep the same model highlighted if it is still listed."""
        highlighted = self._highlighted
        query = self._query

        def matching(is_installed: bool) -> list[AvailableModel]:
            return [
                model
                for model in self._models or ()
                if model.is_installed == is_installed and is_match(query, f"{model.reference} {model.family}")
            ]

        installed = {model.reference for model in self._models or () if model.is_installed}
        downloads = [
            each.model or _unknown_model(each.reference)
            for each in self._downloads.unfinished
            # A model that is on this machine can be used even if the download of its draft model has failed.
            if is_match(query, each.reference) and not (each.ended.is_set() and each.reference in installed)
        ]
        downloading = {model.reference for model in downloads}
        listed = {name for model in self._models or () for name in (model.reference, model.path) if name}
        listed |= downloading
        groups = (
            ("Downloads", downloads, ""),
            (
                "On this machine",
                # A model whose draft model is still being downloaded is on this machine too.
                [each for each in matching(True) if each.reference not in downloading],
                "" if self._models is not None else "Looking for models…",
            ),
            ("To download", [each for each in matching(False) if each.reference not in downloading], ""),
            (
                "On Hugging Face",
                [each for each in self._found if not {each.reference, each.path} & listed],
                self._hub_note,
            ),
        )
        self._shown = {}
        options = []
        for heading, models, note in groups:
            if not models and not note:
                continue
            options.append(Option(Content.assemble((heading, "bold")), disabled=True))
            options += [self._option(model) for model in models]
            if note and not models:
                options.append(Option(Content.assemble((f"  {note}", "$muted")), disabled=True))
        self._list.set_options(options)
        if self._shown:
            chosen = highlighted.reference if highlighted and highlighted.reference in self._shown else ""
            if not chosen and not query:
                used = (model.reference for model in self._shown.values() if self._is_used(model))
                chosen = next(used, "")
            self._list.highlighted = self._list.get_option_index(chosen or next(iter(self._shown)))
        self._show_details()

    def _option(self, model: AvailableModel) -> Option:
        self._shown[model.reference] = model
        return Option(self._row(model), id=model.reference)

    def _row(self, model: AvailableModel) -> Content:
        width = max(20, self._list.scrollable_content_region.width or self.size.width - 8)
        return row_text(
            self._with_plan(model),
            width,
            is_used=self._is_used(model),
            is_default=model.reference == self._default,
            download=self._downloads.find(model.reference),
        )

    def _with_plan(self, model: AvailableModel) -> AvailableModel:
        """Return `model` with its planned draft model and whether both fit in memory."""
        preview = self._plans.get(model.reference)
        if preview is None:
            return model
        return replace(
            model, draft=preview.draft or "", download_bytes=0, fits=preview.plan.fits_without_streaming
        )

    def _is_used(self, model: AvailableModel) -> bool:
        return is_open(model.path, self._runtime)

    def _refresh_downloads(self) -> None:
        """Update the download progress, and move finished downloads to the models on this machine."""
        for reference, model in self._shown.items():
            download = self._downloads.find(reference)
            if download is None or model.is_installed:
                continue
            if download.ended.is_set() and download.error is None:
                self._list_models()
                return
            self._list.replace_option_prompt(reference, self._row(model))
        self._show_details()

    @property
    def _highlighted(self) -> AvailableModel | None:
        option = self._list.highlighted_option
        return self._shown.get(option.id or "") if option else None

    @on(OptionList.OptionHighlighted)
    def _model_highlighted(self) -> None:
        self._show_details()
        self._plan_highlighted()

    @work(exclusive=True, group="plan")
    async def _plan_highlighted(self) -> None:
        """Plan the highlighted model if it is on this machine, and show the plan instead of an estimate."""
        model = self._highlighted
        if model is None or not model.is_installed or self._is_used(model) or model.reference in self._plans:
            return
        await asyncio.sleep(_PLAN_DELAY_SECONDS)
        budget = {} if self._budget_bytes is None else {"memory": self._budget_bytes}
        # A model without a plan, for example because its file is damaged, keeps its estimate.
        with suppress(EdgespecError):
            preview, _ = await self._planning.run(
                lambda: plan_kept(self._plan_model, model.reference, self._kept, budget)
            )
            self._plans[model.reference] = preview
            if model.reference in self._shown:
                self._list.replace_option_prompt_at_index(
                    self._list.get_option_index(model.reference), self._row(model)
                )
            self._show_details()

    def _show_details(self) -> None:
        model = self._highlighted
        if self._message or model is None:
            self._details.update(Content(self._message))
            return
        is_downloading = self._downloads.is_running(model.reference)
        is_used = self._is_used(model)
        plan, drafters = None, None
        if is_used:
            plan, drafters = self._runtime.plan, drafter_names(self._runtime)
        elif (preview := self._plans.get(model.reference)) is not None:
            plan, drafters = preview.plan, labelled_drafters(preview.draft, preview.heads)
        self._details.update(
            details_text(
                self._with_plan(model),
                self._budget_bytes,
                is_used=is_used,
                plan=plan,
                drafters=drafters,
                is_downloading=is_downloading,
            )
        )

    async def action_use_as_default(self) -> None:
        """Make the highlighted model the default for new chats. If it already is, remove the default."""
        model = self._highlighted
        if model is None:
            return
        reference = "" if model.reference == self._default else model.reference
        if not model.is_installed:
            self._message = f"{model.reference} is not on this machine yet. Press Enter to download it."
        else:
            try:
                await asyncio.to_thread(_set_default_for_chats, reference)
            except (ConfigurationError, OptionError) as error:
                self._message = sentences(error.what, error.next_step)
            else:
                self._default = reference
                self._message = (
                    f"{reference} is now the default for new chats. To undo that, press Ctrl+D again."
                    if reference
                    else "There is no default any more: new chats will open with the model that you used"
                    " last."
                )
        self._show()

    def action_move(self, how: str) -> None:
        """Move the highlight while the text field keeps focus."""
        self._message = ""
        getattr(self._list, f"action_{how}")()

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _choose(self) -> None:
        model = self._highlighted
        if model is None or self._is_used(model):
            return
        if self._downloads.is_running(model.reference):
            self._downloads.stop(model.reference)
            self._refresh_downloads()
        elif not model.can_run and not model.is_installed:
            self._message = f"{model.reference} was not downloaded, because it is too large for this machine."
            self._show_details()
        else:
            self.dismiss(model)

    @work(exclusive=True, group="measure")
    async def action_measure(self) -> None:
        """Measure this machine's speed, so that the list can show expected speeds."""
        plan = self._runtime.plan
        if self._is_writing:
            self._message = (
                "The speed cannot be measured during a reply. When it has ended, press F9 and Ctrl+S."
            )
        elif plan is not None and plan.free_bytes("memory") < MEASURING_BYTES:
            needed = format_bytes(MEASURING_BYTES)
            self._message = (
                f"Measuring the speed needs {needed} of free memory. Switch to a smaller model, then press F9"
                " and Ctrl+S."
            )
        else:
            await self._measure()
        self._show_details()

    async def _measure(self) -> None:
        def progress(_description: str, fraction: float) -> bool:
            if not self._left.is_set():
                self.call_later(self._show_measuring, fraction)
            return not self._left.is_set()

        self._show_measuring(0.0)
        try:
            self._message = await in_thread(lambda: edgespec.measure_speed(progress))
            self._list_models()
        except EdgespecError as error:
            self._message = sentences(error.what, error.next_step)

    def _show_measuring(self, fraction: float) -> None:
        self._message = f"Measuring this machine, {fraction:.0%}. This takes about 20 seconds; Esc stops it."
        self._show_details()


def _unknown_model(reference: str) -> AvailableModel:
    """Return a row for a model that is being downloaded but was never in the list."""
    return edgespec.AvailableModel(
        reference=reference,
        place="search",
        parameters=0,
        size_bytes=0,
        draft="",
        download_bytes=0,
        needed_bytes=0,
        fits=True,
        speed=None,
    )


def default_for_chats() -> str:
    """Return the default model for new chats in the settings, or an empty string if there is none."""
    try:
        chat = tomllib.loads(read_text(settings_path()) or "").get(_SETTING[0])
    except ConfigurationError:
        # The chat reports the damaged file the next time it starts.
        return ""
    return str(chat.get(_SETTING[1], "")) if isinstance(chat, dict) else ""


def _set_default_for_chats(reference: str) -> None:
    """Set the default model for new chats in the settings, or remove it if `reference` is empty.

    Raises:
        ConfigurationError: The settings file cannot be changed.
        OptionError: The reference is not valid UTF-8.
    """
    write_value(settings_path(), _SETTING, quoted(reference) if reference else None)


def row_text(
    model: AvailableModel, width: int, *, is_used: bool, is_default: bool, download: Download | None
) -> Content:
    """Return a model's row in the list, `width` cells wide. Narrow rows omit columns.

    Args:
        model: The model.
        width: Width of the row in cells.
        is_used: Whether the chat uses this model.
        is_default: Whether new chats open with this model.
        download: The download of the model, if there is one.
    """
    values = {
        "size": f"~{_size(model)}" if not model.is_installed and model.size_bytes else _size(model),
        "fits": _fit_text(model),
        "speed": speed_text(model),
        "draft": f"+ {draft}" if (draft := _offered_draft(model)) else "",
    }
    columns = [(name, size) for name, (size, least) in _COLUMNS.items() if width >= least]
    right = "".join(_cell(values[name], size) for name, size in columns)
    if download is not None and not model.is_installed:
        right = f"  {download.state}{download.time_left}".ljust(len(right))
    default = " (default)" if is_default else ""
    name_width = width - len(right) - len(default) - 2
    name = model.reference if len(model.reference) <= name_width else f"…{model.reference[1 - name_width :]}"
    return Content.assemble(
        ("• " if is_used else "  ", "$primary"),
        (name, "" if model.can_run else "$muted"),
        (default, "$primary"),
        " " * (name_width - len(name)),
        (right, "$muted"),
    )


def _fit_text(model: AvailableModel) -> str:
    if not model.size_bytes or model.fits:
        return "fits" if model.size_bytes else ""
    return "from disk" if model.is_streamed else "too large"


def _cell(text: str, width: int) -> str:
    """Pad or shorten a table cell to this width, with two spaces before the text."""
    return f"  {text if len(text) <= width - 2 else f'{text[: width - 3]}…'}".ljust(width)


def _offered_draft(model: AvailableModel) -> str:
    """Return the draft model to load or download with a model, or an empty string if there is none."""
    return "" if model.is_installed and model.download_bytes else model.draft


def _size(model: AvailableModel) -> str:
    return format_bytes(model.size_bytes) if model.size_bytes else "size ?"


def details_text(
    model: AvailableModel,
    budget_bytes: int | None,
    *,
    is_used: bool,
    plan: MemoryPlan | None,
    drafters: Sequence[tuple[str, str]] | None,
    is_downloading: bool,
) -> Content:
    """Return the details of the highlighted model, and a description of what Enter does.

    Args:
        model: The model.
        budget_bytes: Memory that models may use, or None if unknown.
        is_used: Whether the chat uses this model.
        plan: The memory plan for this model, or None if it has not been planned yet.
        drafters: Labels and names of the draft model and heads that are used with this model, or None if it
            has not been planned yet.
        is_downloading: Whether the model is being downloaded.
    """
    memory = "Its size is unknown."
    budget = f" edgespec may use {format_bytes(budget_bytes)}." if budget_bytes is not None else ""
    if plan is not None:
        memory = f"It needs {format_bytes(plan.total_bytes)} of memory.{budget}"
    elif model.needed_bytes:
        streamed = (
            " Part of it is read from disk for every token, which is slow." if model.is_streamed else ""
        )
        memory = f"It needs about {format_bytes(model.needed_bytes)} of memory.{budget}{streamed}"
    if drafters is None:
        drafters = [("Draft model", draft)] if (draft := _offered_draft(model)) else []
    names = " and ".join(f"the {label.lower()} {name}" for label, name in drafters)
    action = _action(model, is_downloading)
    if is_used:
        action = f"This chat uses this model{f' with {names}' if names else ''}."
        names = ""
    is_disturbed = model.speed is not None and model.speed.is_disturbed
    doubt = ", but other programs were busy; press Ctrl+S to measure again" if is_disturbed else ""
    if model.speed is None:
        measure = "To see how fast it would be, press Ctrl+S."
        speed = f"It is sped up by {names}. {measure}" if names else measure
    elif names:
        gain = f"{model.speed.speedup:.1f}x as fast as without it"
        speed = f"Expected speed: {rate(model.speed.fastest_tokens_per_second)} with {names}, {gain}{doubt}."
    else:
        speed = f"Expected speed: {rate(model.speed.fastest_tokens_per_second)}{doubt}."
    if plan is not None and plan.streaming is not None:
        memory = f"It is larger than memory: {plan.streaming.text}."
    return Content.assemble(
        (f"{model.reference}, {_place(model)}", "bold"),
        "\n",
        (action, "$primary" if model.can_run else "$warning"),
        f"\n{memory} {speed}",
    )


def _place(model: AvailableModel) -> str:
    is_packaged = model.place == "embedded" and model.entry is not None and model.entry.package
    return "installed with edgespec" if is_packaged else _PLACES[model.place]


def _action(model: AvailableModel, is_downloading: bool) -> str:
    if is_downloading:
        return "Press Enter to stop the download. You can resume it later."
    if not model.is_installed and not model.can_run:
        return "This model is too large for this machine."
    if model.is_installed:
        warning = "" if model.can_run else " It may not fit in memory."
        return f"Press Enter to switch to this model.{warning}"
    size = f" ({format_bytes(model.download_bytes)})" if model.download_bytes else ""
    entry, terms = model.entry, ""
    if entry is not None and entry.is_gated:
        terms = f" First, accept its licence at huggingface.co/{entry.repository}."
    draft = " and its draft model" if size and _offered_draft(model) else ""
    return f"Press Enter to download it{draft}{size} in the background.{terms}"
