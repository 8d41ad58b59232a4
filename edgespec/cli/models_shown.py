"""Format models as text and JSON for `edgespec models`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import EdgespecError
from edgespec.system.files import format_bytes

if TYPE_CHECKING:
    from edgespec import ModelFacts
    from edgespec.model.model_facts import ModelInfo
    from edgespec.store.catalogue import HeadEntry, ModelEntry, ModelFormat
    from edgespec.store.drafts import DraftChoice, DraftOption
    from edgespec.store.heads import HeadOption
    from edgespec.store.installed import InstalledModel, RecommendedSetting
    from edgespec.store.prepared_files import PreparedModel
    from edgespec.store.reference import Resolved

__all__ = [
    "STORED_BY",
    "Shown",
    "entry_json",
    "installed_json",
    "is_head_folder",
    "prepared_json",
    "published_head",
]

STORED_BY = {"embedded": "edgespec", "ollama": "Ollama", "lmstudio": "LM Studio", "hub": "Hugging Face"}
_MAX_DRAFTS = 8
_TOO_SMALL = (
    "cannot be predicted, because this model is so small that drafting usually costs more time than it saves;"
    " `edgespec bench` measures it"
)
_NO_DRAFTS = "none; to try another model with the same tokens, name it with --draft"
_NO_HEAD = "none was found for this model; to use one from elsewhere, name its folder with --head"
_NO_ADVICE = "no advice from its makers was found; edgespec's own defaults apply (see `edgespec config`)"


@dataclass(slots=True)
class Shown:
    """Everything that `edgespec models show` reports about a model or a head.

    Attributes:
        reference: The reference that the user typed.
        entry: Catalogue entry of a model, if there is one.
        head: Catalogue entry of a head, if there is one.
        found: The resolved model. None if it is not on this machine.
        missing: Why the model was not found on this machine.
        next_step: What to do if it was not found.
        info: Metadata read from the model files.
        sampling: The sampling settings that the model's makers recommend, by name.
        facts: Properties of the loaded model. None without `--probe`.
        options: Models that can draft for this one, best first.
        choice: The draft model that `--draft auto` would use.
        heads: Heads for this model, most preferred first.
        why_no_speedup: Why no speed-up is expected on this machine, and which model would be faster. Empty if
            a draft model or head is expected to help.
        problem: The error if the model could not be read or loaded.
    """

    reference: str
    entry: ModelEntry | None = None
    head: HeadEntry | None = None
    found: Resolved | None = None
    missing: str = ""
    next_step: str = ""
    info: ModelInfo | None = None
    sampling: Mapping[str, RecommendedSetting] = field(default_factory=dict)
    facts: ModelFacts | None = None
    options: Sequence[DraftOption] = ()
    choice: DraftChoice | None = None
    heads: Sequence[HeadOption] = ()
    why_no_speedup: str = ""
    problem: str = ""

    @property
    def format(self) -> ModelFormat | None:
        """Return the file format of the model, or of its catalogue entry if there are no files."""
        known = self.found or self.entry
        return known.format if known else None

    @property
    def is_too_small(self) -> bool:
        """Whether the model is smaller than the smallest whose speed-up edgespec can predict."""
        from edgespec.store.constants import MIN_ESTIMABLE_BYTES

        size_bytes = self.info.pass_bytes if self.info else 0
        size_bytes = size_bytes or (self.entry.approximate_file_bytes if self.entry else 0)
        return 0 < size_bytes < MIN_ESTIMABLE_BYTES

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of `edgespec models show --json`."""
        found, choice = self.found, self.choice
        model = (_info_json(self.info) if self.info else {}) | (
            _loaded_json(self.facts) if self.facts else {}
        )
        return {
            "reference": self.reference,
            "on_this_machine": found is not None,
            "path": str(found.path) if found else None,
            "source": found.source if found else None,
            "format": self.format,
            "note": found.note if found else self.missing,
            "catalogue": entry_json(self.entry)
            if self.entry
            else head_entry_json(self.head)
            if self.head
            else None,
            "model": model or None,
            "sampling": {name: setting._asdict() for name, setting in self.sampling.items()},
            "drafts": [_draft_json(option, is_too_small=self.is_too_small) for option in self.options],
            "auto_draft": {
                "draft": choice.draft.name if choice and choice.draft else None,
                "why": choice.reason if choice else self.missing,
            },
            "heads": [_head_json(head) for head in self._shown_heads],
            "why_no_speedup": self.why_no_speedup or None,
            "problem": self.problem,
        }

    def lines(self) -> list[tuple[str, str]]:
        """Return the (name, value) lines of `edgespec models show`."""
        if self.head or (self.info and self.info.kind == "head"):
            name = ("head", self.found.note if self.found else self.reference)
            problem = [("problem", self.problem)] if self.problem else []
            return [name, *head_lines(self.reference, self.head, self.info), *problem]
        lines = [("model", self.found.note if self.found else self.reference), *_entry_lines(self.entry)]
        if (known := self.found or self.entry) is not None:
            lines.append(("format", known.file_format.label))
        if self.found is None:
            lines.append(("on this machine", f"no; {self.next_step}"))
        if self.info is not None:
            lines += _info_lines(self.info, self.entry)
        lines.append(("default settings", _sampling_line(self.sampling) or _NO_ADVICE))
        if self.facts is not None:
            lines += _capability_lines(self.facts)
        if self.choice is not None:
            lines += _draft_lines(self.options, self.choice, is_too_small=self.is_too_small)
        lines += [("head", _head_line(head)) for head in self._shown_heads]
        if self.choice is not None and not self.heads:
            lines.append(("head", _NO_HEAD))
        if self.why_no_speedup:
            lines.append(("speed-up on this machine", self.why_no_speedup))
        if self.is_too_small and (self.options or self.heads):
            lines.append(("expected speed-up", _TOO_SMALL))
        return [*lines, ("problem", self.problem)] if self.problem else lines

    @property
    def _shown_heads(self) -> Sequence[HeadOption]:
        return [replace(head, speedup=0.0) for head in self.heads] if self.is_too_small else self.heads


def _count_text(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 0.9995e9 else f"{count / 1e6:.3g} M"


def entry_json(entry: ModelEntry) -> dict[str, Any]:
    """Return a catalogue entry as a JSON object."""
    return {
        "name": entry.name,
        "format": entry.format,
        "aliases": dict(entry.aliases),
        "family": entry.family,
        "parameters": entry.parameters,
        "quantisation": entry.quantisation,
        "file_bytes": entry.approximate_file_bytes,
        "projector_bytes": entry.approximate_projector_bytes or None,
        "context_tokens": entry.context_tokens,
        "licence": entry.licence,
        "chat_template": entry.chat_template,
        "embedded": bool(entry.embedded_file),
        "gguf": entry.gguf_repository,
        "mlx": entry.mlx_repository,
        "heads": list(entry.heads),
        "drafts": list(entry.drafts),
        "notice": entry.notice,
        "sources": list(entry.sources),
    }


def installed_json(installed_model: InstalledModel) -> dict[str, Any]:
    """Return a model on this machine as a JSON object."""
    return {
        "reference": installed_model.reference,
        "kept_by": installed_model.place,
        "path": str(installed_model.path),
        "format": installed_model.format,
        "catalogue": installed_model.entry.name if installed_model.entry else None,
        **_info_json(installed_model.info),
    }


def prepared_json(prepared: PreparedModel) -> dict[str, Any]:
    """Return the result of `edgespec prepare` as a JSON object."""
    return {
        "kind": prepared.kind,
        "source": str(prepared.source),
        "path": str(prepared.folder),
        "bytes": prepared.size_bytes,
    }


def _info_json(info: ModelInfo) -> dict[str, Any]:
    return {
        "family": info.family,
        "architecture": info.architecture,
        "parameters": info.parameters,
        "quantisation": info.quantisation,
        "file_bytes": info.size_bytes,
        "bytes_per_token": info.pass_bytes,
        "kv_bytes_per_1000_tokens": info.kv_bytes * 1000,
        "trained_context_tokens": info.context_tokens,
        "vocab_size": info.vocab_size,
        "vocabulary": info.vocabulary,
        "chat_template": info.chat_template,
        "licence": info.licence,
        "experts": info.experts,
        "experts_used": info.experts_used,
        "heads": list(info.heads),
        "hidden_size": info.hidden_size,
        "read_layers": list(info.read_layers),
        "draft_vocab_size": info.draft_vocab_size,
    }


def _loaded_json(facts: ModelFacts) -> dict[str, Any]:
    return {
        "description": facts.description,
        "weight_bytes": facts.weight_bytes,
        "kv_bytes_per_1000_tokens": facts.kv_bytes * 1000 // facts.context_tokens,
        "capabilities": asdict(facts.capabilities)
        | {"self_draft_methods": sorted(facts.capabilities.self_draft_methods)},
        "rollback": facts.rollback,
    }


def _draft_json(option: DraftOption, *, is_too_small: bool) -> dict[str, Any]:
    return {
        "reference": option.reference,
        "on_this_machine": option.path is not None,
        "format": option.format,
        "by": option.source,
        "shared_tokens": option.shared_token_fraction,
        "parameters": option.parameters,
        "file_bytes": option.size_bytes,
        "expected_speedup": None if is_too_small else round(option.speedup, 3),
        "measured_acceptance": option.acceptance_rate,
    }


def _head_json(head: HeadOption) -> dict[str, Any]:
    return {
        "reference": head.reference or None,
        "kind": head.kind,
        "method": head.method or None,
        "on_this_machine": head.head is not None,
        "source": head.source,
        "file_bytes": head.size_bytes,
        "licence": head.licence or None,
        "expected_speedup": round(head.speedup, 3) or None,
        "published_speedup": head.published or None,
        "works": not head.problem,
        "why_not": head.problem,
    }


def _head_line(head: HeadOption) -> str:
    if head.problem:
        use = f"not used: {head.problem}"
    elif head.must_be_named:
        use = f"on this machine; use it with --head {head.reference} --method {head.method}"
    elif head.head is None and not head.reference:
        use = f"usable once the model is downloaded, with --method auto or {head.method}"
    elif head.head is None:
        use = f"not on this machine; --head {head.reference} downloads it"
    else:
        use = f"usable with --method auto or {head.method}"
    kind = head.kind if head.reference else ""
    licence = f"licence {head.licence}" if head.licence else ""
    return f"{head.name}: {'; '.join(filter(None, (kind, head.expectation, licence, use)))}"


def _suggested_drafts(entry: ModelEntry) -> str:
    if not entry.drafts and entry.heads:
        return "none, because a head drafts for this model"
    return ", ".join(entry.drafts) or _NO_DRAFTS


def _image_lines(entry: ModelEntry) -> list[tuple[str, str]]:
    size = entry.approximate_projector_bytes
    return [("images", f"yes, with a projector of about {format_bytes(size)}")] if size else []


def _entry_lines(entry: ModelEntry | None) -> list[tuple[str, str]]:
    if entry is None:
        return []
    lines = [
        ("names", ", ".join((entry.name, *entry.aliases))),
        ("family", f"{entry.family}, {_count_text(entry.parameters)} parameters"),
        ("default version", f"{entry.quantisation}, about {format_bytes(entry.approximate_file_bytes)}"),
        *_image_lines(entry),
        ("context length", f"{entry.context_tokens:,} tokens"),
        ("chat template", entry.chat_template),
        ("suggested draft models", _suggested_drafts(entry)),
        ("source", entry.repository or ("installed with" if entry.package else "included in") + " edgespec"),
        ("licence", entry.licence),
        ("facts from", "; ".join(entry.sources)),
    ]
    return [*lines, ("notice", entry.notice)] if entry.notice else lines


def _info_lines(info: ModelInfo, entry: ModelEntry | None) -> list[tuple[str, str]]:
    experts = f", {info.experts_used} of {info.experts} experts per token" if info.experts else ""
    trained = f"{info.context_tokens:,} tokens" if info.context_tokens else "not stated in the files"
    same = f"ID {info.vocabulary[:12]}" if info.vocabulary else "cannot be compared with other models"
    file = f"{info.family}: {info.architecture}, {info.quantisation}, {format_bytes(info.size_bytes)}"
    if entry is not None and info.quantisation == entry.packaged_quantisation:
        file += f"; converted to {entry.quantisation} when it is first loaded"
    lines = [
        ("file", file),
        ("parameters", f"{info.parameters:,}{experts}"),
        ("trained context length", trained),
        ("vocabulary", f"{info.vocab_size:,} tokens ({same})"),
        (
            "KV cache",
            f"{format_bytes(info.kv_bytes * 1000)} of memory per 1,000 tokens of context, at 16 bits",
        ),
        (
            "has chat template",
            "yes" if info.chat_template else "no; use `edgespec generate --raw` instead of `edgespec chat`",
        ),
    ]
    return [*lines, ("licence (from its files)", info.licence)] if info.licence else lines


def _sampling_line(settings: Mapping[str, RecommendedSetting]) -> str:
    """Format recommended settings, such as `temperature 0.2, top_p 0.9 (from the catalogue)`, if any."""
    by_source = groupby(settings.items(), key=lambda item: item[1].source)
    return "; ".join(
        ", ".join(f"{name} {setting.value:g}" for name, setting in items) + f" (from {source})"
        for source, items in by_source
    )


def _capability_lines(facts: ModelFacts) -> list[tuple[str, str]]:
    capabilities = facts.capabilities
    if not capabilities.rollback:
        speculation = f"no: {capabilities.reason}"
    elif capabilities.tree:
        speculation = "yes, with one or more proposals for each token"
    else:
        speculation = f"yes, with only one proposal for each token: {capabilities.reason}"
    return [("can be sped up", speculation), ("undoing rejected tokens", facts.rollback)]


def _draft_lines(
    options: Sequence[DraftOption], choice: DraftChoice, *, is_too_small: bool
) -> list[tuple[str, str]]:
    """Format the possible draft models, and mark the one that `--draft auto` would use."""
    lines = []
    for option in options[:_MAX_DRAFTS]:
        here = "" if option.path else ", not on this machine"
        sizes = f"{_count_text(option.parameters)} parameters, {format_bytes(option.size_bytes)}"
        basis = "estimated from its size"
        if option.acceptance_rate is not None:
            basis += f" and the measured acceptance rate of {option.acceptance_rate:.0%}"
        gain = "" if is_too_small else f"; expected speed-up {option.speedup:.1f}x, {basis}"
        details = f"{option.tokens}, {sizes}, {option.format.upper()}{gain}{here}"
        lines.append(("draft model", f"{option.reference}: {details}"))
    if len(options) > _MAX_DRAFTS:
        lines.append(("draft model", f"and {len(options) - _MAX_DRAFTS} more"))
    chosen = choice.draft.name if choice.draft else "none"
    return [*lines, ("chosen draft model", f"{chosen}; {choice.reason}")]


def published_head(reference: str) -> HeadEntry | None:
    """Return the catalogue entry for the head with this name or repository, or None."""
    from edgespec.store.catalogue import load_catalogue

    return load_catalogue().find_head(reference.strip().removeprefix("hf:"))


def is_head_folder(reference: str) -> bool:
    """Return whether the reference is the path of a folder that contains a head."""
    from edgespec.model.formats.head_files import head_info

    path = Path(reference.strip()).expanduser()
    try:
        return path.is_dir() and head_info(path).kind == "head"
    except (EdgespecError, OSError):
        return False


def head_entry_json(entry: HeadEntry) -> dict[str, Any]:
    """Return a head's catalogue entry as a JSON object."""
    return {
        "name": entry.name,
        "kind": entry.kind,
        "targets": list(entry.targets),
        "file_bytes": entry.approximate_file_bytes,
        "embedded": bool(entry.embedded_file),
        "repository": entry.repository,
        "gguf_file": entry.gguf_file,
        "licence": entry.licence or None,
        "published_speedup": entry.published_speedup or None,
        "published_on": entry.published_on,
        "sources": list(entry.sources),
    }


def head_lines(reference: str, entry: HeadEntry | None, info: ModelInfo | None) -> list[tuple[str, str]]:
    """Return the (name, value) lines about a head.

    Args:
        reference: The reference that the user typed.
        entry: The head's catalogue entry, if there is one.
        info: Metadata of the head's files. None if the head is not on this machine.
    """
    from edgespec.model.formats.head_files import method_of
    from edgespec.store.hub_files import hub_name

    kind = entry.kind if entry else info.heads[0] if info and info.heads else "unknown"
    method = method_of(kind)
    lines = [
        (
            "what it is",
            (
                f"a draft head, which proposes tokens for one model and cannot run alone ({kind}, method"
                f" {method})"
            ),
        ),
    ]
    if entry:
        lines.append(("made for", ", ".join(entry.targets)))
    if entry and not entry.embedded_file:
        lines.append(("source", hub_name(entry.repository, entry.gguf_file)))
    if info is None:
        if entry:
            lines.append(("size", f"about {format_bytes(entry.approximate_file_bytes)}"))
        lines.append(("on this machine", f"no; download it with `edgespec models pull {reference}`"))
    else:
        lines += _file_lines(kind, info)
    if entry:
        lines.append(("licence", entry.licence or f"none was found; see huggingface.co/{entry.repository}"))
    if info is not None and info.licence:
        lines.append(("licence (from its files)", info.licence))
    if entry and entry.published_speedup:
        measured = f"{entry.published_speedup:.1f}x on {entry.published_on}, measured by its publisher"
        lines.append(("speed-up", measured))
    if entry:
        lines.append(("facts from", "; ".join(entry.sources)))
    target = entry.targets[0] if entry else "MODEL"
    use = f"--target {target} --head {shlex.quote(reference)}"
    where = "" if entry else ", where MODEL is the model that it was trained for"
    return [
        *lines,
        ("use it with", f"{use}{where} (add --method {method} to use it even when it is slower)"),
    ]


def _file_lines(kind: str, info: ModelInfo) -> list[tuple[str, str]]:
    lines = [("size", ", ".join(filter(None, (format_bytes(info.size_bytes), info.quantisation))))]
    if info.parameters:
        lines.append(("parameters", f"{info.parameters:,}"))
    lines.append(("reads", _reads(kind, info)))
    if info.draft_vocab_size:
        is_all = info.draft_vocab_size == info.vocab_size
        share = "all" if is_all else f"{info.draft_vocab_size:,} of the"
        lines.append(("can propose", f"{share} {info.vocab_size:,} tokens of the model"))
    return lines


def _reads(kind: str, info: ModelInfo) -> str:
    if info.read_layers:
        *first, last = map(str, info.read_layers)
        where = f"the hidden states of the model's layers {', '.join(first)} and {last}"
    elif kind in ("EAGLE-3", "DFlash"):
        where = "hidden states of several layers of the model; the files do not say which"
    else:
        where = "the last hidden state of the model"
    return f"{where} ({info.hidden_size:,} numbers each)" if info.hidden_size else where
