"""The options that commands share, declared once; their defaults are those of the API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from edgespec.cli.help import SectionOption

__all__ = [
    "MAX_SEED",
    "METHOD_NAMES",
    "MODEL_NAMES",
    "PREFIX_CACHE_NAMES",
    "SAMPLING_NAMES",
    "SIZE_NAMES",
    "Decorator",
    "SettingOption",
    "acceptance_option",
    "drafting_options",
    "every_setting",
    "given",
    "json_option",
    "listed",
    "method_options",
    "model_options",
    "model_reference",
    "pick",
    "prefix_cache_options",
    "reply_options",
    "sampling_options",
    "whole",
]

_Item = TypeVar("_Item")
Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

MODEL_NAMES = (
    "target", "draft", "memory", "prefer", "context", "reserve_full_context", "threads", "gpu_layers",
    "kv_type", "flash_attention", "mmap", "mlock", "adapter", "exact", "draft_branches",
    "draft_confidence", "draft_window", "draft_sinks", "exit_layer", "corpus", "remember", "learn",
    "max_loss", "measure_costs",
)  # fmt: skip
PREFIX_CACHE_NAMES = ("prefix_cache", "prefix_cache_memory", "prefix_cache_disk")
METHOD_NAMES = ("method", "draft_length", "acceptance")
SAMPLING_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "penalty_window", "logit_bias",
)  # fmt: skip
SIZE_NAMES = ("memory", "prefix_cache_memory", "prefix_cache_disk")
METHODS = (
    "auto", "none", "model", "ngram", "suffix", "lookahead", "layerskip", "lowbit", "swift", "model+suffix",
    "layerskip+suffix", "lowbit+suffix",
)  # fmt: skip
ACCEPTANCES = ("invariant", "rejection")
_KV_TYPES = ("auto", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "iq4_nl", "q4_1", "q4_0")
MAX_SEED = (1 << 63) - 1


def pick(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """These options of all that a command was given."""
    return {name: options[name] for name in names if name in options}


def given(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that the person wrote, without the ones that are left at their default."""
    return {
        name: value
        for name, value in options.items()
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }


def whole(low: int, high: int | None = None) -> Callable[[Any], int]:
    """Reads a whole number from `low` to `high`."""

    def read(value: Any) -> int:
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            span = f"from {low} up" if high is None else f"from {low} to {high}"
            raise click.BadParameter(f"{value!r} is not a whole number {span}")
        return number

    return read


def share(value: Any) -> float:
    """Reads `2%` or `0.02`."""
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= 1.0:
        raise click.BadParameter(f"{value!r} is not a share such as 2% or 0.02")
    return number


def listed(read_item: Callable[[str], _Item]) -> Callable[[Any], tuple[_Item, ...]]:
    """Reads values joined by commas."""

    def read(value: Any) -> tuple[_Item, ...]:
        if not isinstance(value, str):
            return tuple(value)
        try:
            return tuple(read_item(part.strip()) for part in value.split(","))
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not a list of values joined by commas") from error

    return read


def _branches(value: Any) -> tuple[int, ...] | str:
    """Reads `auto` or `3,2`."""
    if value == "auto":
        return "auto"
    try:
        return listed(whole(1))(value)
    except click.BadParameter as error:
        raise click.BadParameter(f"{error.message}: write auto, or numbers such as 3,2") from error


def _token_bias(value: Any) -> tuple[int, float]:
    """Reads `1523=-inf`."""
    token, _, bias = str(value).partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not ID=VALUE, such as 1523=-2.5 or 1523=-inf") from error


def _as_mapping(
    _ctx: click.Context, _param: click.Parameter, pairs: tuple[tuple[int, float], ...]
) -> dict[int, float]:
    return dict(pairs)


def _complete_model(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Names of the user, the catalogue, Ollama and LM Studio; files when none begins like that."""
    from edgespec.catalog import load_catalogue
    from edgespec.catalog.catalogue import user_aliases
    from edgespec.catalog.other_programs import installed_names
    from edgespec.errors import EdgespecError

    try:
        own = list(user_aliases())
    except EdgespecError:
        own = []
    known = (*own, *load_catalogue().names, *installed_names())
    names = [name for name in known if name.lower().startswith(typed.lower())]
    return [CompletionItem(name) for name in dict.fromkeys(names)] or [CompletionItem(typed, type="file")]


def _complete_method(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    return [CompletionItem(method) for method in METHODS if method.startswith(typed)]


def model_reference(name: str) -> Decorator:
    """The argument REF, which the shell completes."""
    return click.argument(name, metavar="REF", shell_complete=_complete_model)


def _apply(options: Sequence[Decorator]) -> Decorator:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class SettingOption(SectionOption):
    """An option that a person may set once for all runs: see `edgespec.cli.settings`."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """What is written, or else what is set, or else the default. Raises ConfigurationError."""
        value, source = super().consume_value(ctx, opts)
        if source is not ParameterSource.DEFAULT or ctx.resilient_parsing:
            return value, source
        from edgespec.cli.settings import configured

        found = configured(ctx, self)
        return (found.written, found.source) if found else (value, source)


def _option(section: str, **usual: Any) -> Callable[..., Decorator]:
    usual = {"cls": SettingOption, "show_default": True, "section": section} | usual

    def make(*names: str, **settings: Any) -> Decorator:
        everything: dict[str, Any] = usual | settings
        return click.option(*names, **everything)

    return make


_model = _option("Model options")
_drafting = _option("Drafting options")
_method = _option("Method options")
_sampling = _option("Sampling options")
_reply = _option("Options", show_default=False)
# Options that belong to one model, or to one run: nobody means them for all.
_model_once = _option("Model options", cls=SectionOption)
_drafting_once = _option("Drafting options", cls=SectionOption)

model_options = _apply([
    _model("--target", metavar="REF", default="demo", shell_complete=_complete_model,
           help="The model whose words you get: a .gguf file or an MLX folder, user/repo:quant, or a name"
                " (see `edgespec models list`)."),
    _model("--draft", metavar="REF|auto|none", default="auto", shell_complete=_complete_model,
           help="The model that guesses ahead. auto: the best one on this machine, by its tokens and its size"
                " (see `edgespec models show`)."),
    _model("--memory", metavar="SIZE",
           help="What edgespec may take in all, such as 8GiB: weights, caches, what it computes in, itself."
                " [default: what is available]"),
    _model("--prefer", type=click.Choice(["speed", "context"]), default="speed",
           help="What to keep where memory is short. speed: the draft model; context: long texts."),
    _model("--context", type=whole(1), metavar="N",
           help="Tokens of prompt and reply together. [default: as trained, and beyond 8192 only"
                " while nothing else is given up for it]"),
    _model("--reserve-full-context", is_flag=True, show_default=False,
           help="Take the memory for all of --context at once, by default for 8192 at most. Without it the"
                " caches grow with the text."),
    _model("--threads", type=whole(1), metavar="N",
           help="Threads to compute with. [default: one for each core; one for a tiny model]"),
    _model("--gpu-layers", type=whole(0), metavar="N",
           help="Layers to put on the GPU. [default: all]"),
    _model("--kv-type", metavar="TYPE", default="auto",
           help=f"How the caches are stored: {', '.join(_KV_TYPES)}, or two for keys/values."),
    _model("--flash-attention", type=click.Choice(["auto", "on", "off"]), default="auto",
           help="Whether to use the fused attention kernels."),
    _model("--mmap/--no-mmap", default=True, help="Map the weights from the file, or read them into memory."),
    _model("--mlock/--no-mlock", default=False, help="Keep the weights from being swapped out."),
    _model("--exact/--no-exact", default=False,
           help="Run only passes that give the very logits of plain decoding, to the last bit; they are found"
                " out at the first load. Slower where a model rounds otherwise in wider passes."),
    _model_once("--adapter", metavar="DIR", type=click.Path(),
                help="A folder with a LoRA or DoRA adapter for the target, as mlx-lm writes it."
                     " MLX models only."),
])  # fmt: skip

_branches_option = _drafting(
    "--draft-branches", type=_branches, metavar="auto|N,N,...", default=(), show_default=False,
    help="Guesses to branch into at each depth, such as 3,2. auto: where it pays. [default: none]",
)  # fmt: skip
_window_options = _apply([
    _drafting("--draft-window", type=whole(0), metavar="N",
              help="Let the draft see the last N tokens only; 0 is all."
                   " [default: all, while it was trained for as many]"),
    _drafting("--draft-sinks", type=whole(0), metavar="N", default=4,
              help="First tokens the draft sees besides its window."),
])  # fmt: skip


def drafting_options(*, remember: bool = False, measuring: bool = False) -> Decorator:
    """How drafters draft. remember: whether replies are kept unless the person says otherwise.

    measuring: the prompts are always the same, so that it is only this command's own option that keeps them.
    """
    return _apply([
        _branches_option,
        _drafting("--draft-confidence", type=float, metavar="P", default=0.0,
                  help="Stop guessing where the draft is less sure than this."),
        _window_options,
        _drafting_once("--exit-layer", type=whole(1), metavar="E",
                       help="Layers that draft with method layerskip, MLX only. [default: measured at load]"),
        _drafting("--corpus", metavar="PATH", type=click.Path(),
                  help="A text file, or a folder of them, that method suffix guesses from: the code you edit,"
                       " for instance."),
        (_drafting_once if measuring else _drafting)(
            "--remember/--no-remember", default=remember,
            help="Keep prompts and replies on this machine, readable by you only, so that method suffix"
                 " guesses from them later."),
        _drafting("--learn/--no-learn", default=False,
                  help="Train an MLX draft between replies on what it guessed wrong."),
        _drafting("--max-loss", type=share, metavar="SHARE",
                  help="The most a reply may lose by guessing: a share of its time, and 2 plain steps. Given,"
                       " it holds for named drafters too. [default: 2% for auto; named drafters guess"
                       " whatever it costs]"),
        _drafting("--measure-costs/--no-measure-costs", default=True,
                  help="Take a second or two at the first load of a model to measure what wide passes cost"
                       " here. Without, replies find it out."),
    ])  # fmt: skip


def prefix_cache_options(*, default: str) -> Decorator:
    """What is kept of texts that were read. keep: where, unless the person says otherwise."""
    return _apply([
        _model("--prefix-cache", type=click.Choice(["none", "memory", "disk"]), default=default,
               help="Where what was read of other chats is kept, so that going back to one reads it no more."
                    " disk: in memory too, and for later runs; private."),
        _model("--prefix-cache-memory", metavar="SIZE",
               help="The most of it in memory. [default: a quarter of what --memory leaves, at most 4 GiB]"),
        _model("--prefix-cache-disk", metavar="SIZE",
               help="The most of it on disk. [default: 4 GiB, or a tenth of the free disk if less]"),
    ])  # fmt: skip


acceptance_option = _method(
    "--acceptance", type=click.Choice(ACCEPTANCES), default="invariant",
    help="invariant: a seed gives the same reply whatever the method. rejection: the same distribution only;"
         " a seed then repeats with one named drafter, not with auto, which goes by the clock.",
)  # fmt: skip

_method_option = _method(
    "--method", metavar="METHOD", default="auto", shell_complete=_complete_method,
    help="auto (a model and suffix, while that is faster), none, or drafters joined by +, which guess"
         " whatever it costs: model, layerskip, lowbit, swift, lookahead, suffix, ngram.",
)  # fmt: skip

# Of how to guess, what changes what is taken.
planned_options = _apply([_method_option, _branches_option, _window_options])

method_options = _apply([
    _method_option,
    _method("--draft-length", type=whole(1, 64), metavar="K",
            help="Tokens to guess ahead, 1 to 64; with auto at most so many. [default: 4; with auto what"
                 " pays, up to 16]"),
    acceptance_option,
])  # fmt: skip

_sampling_without_bias = _apply([
    _sampling("--temperature", type=float, metavar="T", default=0.8, help="0 always takes the likeliest."),
    _sampling("--top-k", type=int, metavar="N", default=40, help="Keep the N likeliest tokens; 0 is off."),
    _sampling("--top-p", type=float, metavar="P", default=0.95, help="Keep this much probability; 1 is off."),
    _sampling("--min-p", type=float, metavar="P", default=0.05,
              help="Drop tokens below this share of the likeliest; 0 is off."),
    _sampling("--typical-p", type=float, metavar="P", default=1.0, help="Typical sampling; 1 is off."),
    _sampling("--repetition-penalty", type=float, metavar="X", default=1.0,
              help="Make tokens that occurred less likely by this factor; 1 is off."),
    _sampling("--presence-penalty", type=float, metavar="X", default=0.0,
              help="Take this from the logit of tokens that occurred; 0 is off."),
    _sampling("--frequency-penalty", type=float, metavar="X", default=0.0,
              help="Take this from the logit once for each occurrence; 0 is off."),
    _sampling("--penalty-window", type=int, metavar="N", default=64,
              help="How many of the last tokens the penalties see; -1 is all."),
])  # fmt: skip

_bias = _sampling(
    "--logit-bias", type=_token_bias, metavar="ID=VALUE", multiple=True, callback=_as_mapping,
    show_default=False,
    help="Add to the logit of a token, such as 1523=-2.5; -inf forbids it. May be repeated.",
)  # fmt: skip


def sampling_options(*, logit_bias: bool = True) -> Decorator:
    """The settings of the sampler chain."""
    return _apply([_sampling_without_bias, _bias] if logit_bias else [_sampling_without_bias])


reply_options = _apply([
    _reply("--system", metavar="TEXT", help="Instructions for the model."),
    _reply("-n", "--max-tokens", type=whole(1), metavar="N",
           help="The longest reply, in tokens. [default: 8192, or to the end of the context]"),
    _reply("--seed", type=whole(0, MAX_SEED), metavar="N",
           help="The same seed gives the same reply, whatever the method (but see --acceptance)."
                " [default: another each time]"),
    _reply("--stop", metavar="TEXT", multiple=True,
           help="End the reply before this text. May be repeated."),
])  # fmt: skip


def every_setting() -> dict[str, SettingOption]:
    """The options that may be set once for all runs, by name."""

    @click.command()
    @model_options
    @prefix_cache_options(default="memory")
    @method_options
    @drafting_options()
    @sampling_options()
    @reply_options
    def command(**_options: Any) -> None:
        """Holds the options; nobody runs it."""

    return {each.name: each for each in command.params if isinstance(each, SettingOption) and each.name}


json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
