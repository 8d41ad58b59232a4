"""What `edgespec models` prints of a model: rows, lines and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from edgespec.files import format_bytes

if TYPE_CHECKING:
    from edgespec import ModelFacts
    from edgespec.catalog import (
        DraftChoice,
        DraftOption,
        InstalledModel,
        ModelEntry,
        ModelFormat,
        ModelInfo,
        Resolved,
    )
    from edgespec.prepare.store import PreparedModel

__all__ = [
    "Shown",
    "catalogue_row",
    "entry_json",
    "installed_json",
    "installed_row",
    "prepared_json",
]

_FORMATS = {
    "gguf": "GGUF, run by llama.cpp",
    "mlx": "MLX, run by mlx-lm",
    "layerskip": "GGUF prepared for early exit, run by llama.cpp",
}
_KEPT_BY = {"embedded": "edgespec", "ollama": "Ollama", "lmstudio": "LM Studio", "hub": "Hugging Face cache"}
_MOST_DRAFTS = 8


@dataclass(frozen=True, slots=True)
class Shown:
    """What is known of one model. entry: the catalogue's; found: None where it is not on this machine.

    missing: why it is not. info: from its files; facts: of the loaded model, where that was asked for.
    options, choice: what can draft for it, and what `auto` takes. problem: what could not be found out.
    """

    reference: str
    entry: ModelEntry | None
    found: Resolved | None
    missing: str = ""
    info: ModelInfo | None = None
    facts: ModelFacts | None = None
    options: Sequence[DraftOption] = ()
    choice: DraftChoice | None = None
    problem: str = ""

    @property
    def format(self) -> ModelFormat | None:
        """Of its files, or as the catalogue says."""
        known = self.found or self.entry
        return known.format if known else None

    def to_json(self) -> dict[str, Any]:
        """What `edgespec models show --json` prints."""
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
            "catalogue": entry_json(self.entry) if self.entry else None,
            "model": model or None,
            "drafts": [_draft_json(option) for option in self.options],
            "auto_draft": {
                "draft": choice.draft.name if choice and choice.draft else None,
                "why": choice.why if choice else self.missing,
            },
            "problem": self.problem,
        }

    def lines(self) -> list[tuple[str, str]]:
        """The same for people: names and values."""
        note = self.found.note if self.found else self.reference
        lines = [("reference", note), *_entry_lines(self.entry)]
        if self.format is not None:
            lines.append(("format", _FORMATS[self.format]))
        if self.found is None:
            lines.append(("on this machine", f"no: `edgespec models pull {self.reference}` downloads it"))
        if self.info is not None:
            lines += _info_lines(self.info, self.format)
        if self.facts is not None:
            lines += _capability_lines(self.facts)
        if self.choice is not None:
            lines += _draft_lines(self.options, self.choice)
        return [*lines, ("problem", self.problem)] if self.problem else lines


def catalogue_row(entry: ModelEntry, files: Mapping[str, str]) -> tuple[str, ...]:
    """A model of the catalogue, most important first."""
    return (
        entry.name,
        entry.format,
        format_bytes(entry.approximate_file_bytes),
        ", ".join(files) or "-",
        ", ".join(entry.aliases) or "-",
        entry.quantisation,
        entry.drafts[0] if entry.drafts else "-",
        str(entry.context_tokens),
        entry.family,
        entry.licence,
    )


def installed_row(shelved: InstalledModel) -> tuple[str, ...]:
    """A model on this machine, most important first."""
    return (
        shelved.reference,
        shelved.format,
        format_bytes(shelved.info.size_bytes),
        shelved.info.quantisation or "-",
        _count_text(shelved.info.parameters),
        _KEPT_BY[shelved.place],
        str(shelved.path),
    )


def _count_text(count: int) -> str:
    """A number of parameters for people."""
    return f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count / 1e6:.3g} M"


def entry_json(entry: ModelEntry) -> dict[str, Any]:
    """What the catalogue says."""
    return {
        "name": entry.name,
        "format": entry.format,
        "aliases": dict(entry.aliases),
        "family": entry.family,
        "parameters": entry.parameters,
        "quantisation": entry.quantisation,
        "file_bytes": entry.approximate_file_bytes,
        "context_tokens": entry.context_tokens,
        "licence": entry.licence,
        "chat_template": entry.chat_template,
        "embedded": bool(entry.embedded_file),
        "gguf": entry.gguf_repository,
        "mlx": entry.mlx_repository,
        "drafts": list(entry.drafts),
        "notice": entry.notice,
    }


def installed_json(shelved: InstalledModel) -> dict[str, Any]:
    """A model on this machine."""
    return {
        "reference": shelved.reference,
        "kept_by": shelved.place,
        "path": str(shelved.path),
        "format": shelved.format,
        "catalogue": shelved.entry.name if shelved.entry else None,
        **_info_json(shelved.info),
    }


def prepared_json(prepared: PreparedModel) -> dict[str, Any]:
    """What `edgespec prepare` made."""
    return {
        "kind": prepared.kind,
        "source": str(prepared.source),
        "path": str(prepared.folder),
        "bytes": prepared.size_bytes,
    }


def _info_json(info: ModelInfo) -> dict[str, Any]:
    """What the files of a model say."""
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
    }


def _loaded_json(facts: ModelFacts) -> dict[str, Any]:
    """What is known only of a model that was loaded."""
    return {
        "description": facts.description,
        "weight_bytes": facts.weight_bytes,
        "kv_bytes_per_1000_tokens": facts.kv_bytes * 1000 // facts.context_tokens,
        "capabilities": asdict(facts.capabilities)
        | {"self_draft_methods": sorted(facts.capabilities.self_draft_methods)},
        "rollback": facts.rollback,
    }


def _draft_json(option: DraftOption) -> dict[str, Any]:
    """A model that can draft for another."""
    return {
        "reference": option.reference,
        "on_this_machine": option.path is not None,
        "format": option.format,
        "by": option.by,
        "shared_tokens": option.shared_share,
        "parameters": option.parameters,
        "file_bytes": option.size_bytes,
        "expected_speedup": round(option.speedup, 3),
        "measured_acceptance": option.acceptance,
    }


def _entry_lines(entry: ModelEntry | None) -> list[tuple[str, str]]:
    """What the catalogue says, for people."""
    if entry is None:
        return []
    lines = [
        ("catalogue name", ", ".join((entry.name, *entry.aliases))),
        ("family", f"{entry.family}, {_count_text(entry.parameters)} parameters"),
        ("default file", f"{entry.quantisation}, about {format_bytes(entry.approximate_file_bytes)}"),
        ("context", f"{entry.context_tokens:,} tokens"),
        ("template", entry.chat_template),
        ("recommended", ", ".join(entry.drafts) or "no draft"),
        ("source", entry.repository or "embedded"),
        ("licence", entry.licence),
    ]
    return [*lines, ("notice", entry.notice)] if entry.notice else lines


def _info_lines(info: ModelInfo, form: ModelFormat | None) -> list[tuple[str, str]]:
    """What the files of a model say, for people."""
    experts = f", {info.experts_used} of {info.experts} experts for each token" if info.experts else ""
    template = "use `edgespec generate --raw`" if form != "mlx" else "none in its files"
    lines = [
        ("file", f"{info.family}: {info.architecture}, {info.quantisation}, {format_bytes(info.size_bytes)}"),
        ("parameters", f"{info.parameters:,}{experts}"),
        (
            "trained context",
            f"{info.context_tokens:,} tokens" if info.context_tokens else "its files do not say",
        ),
        ("vocabulary", f"{info.vocab_size:,} tokens, {info.vocabulary[:12] or 'not comparable'}"),
        ("cache", f"{format_bytes(info.kv_bytes * 1000)} for 1,000 tokens, at f16"),
        ("chat template", "yes" if info.chat_template else f"no: {template}"),
    ]
    if info.heads:
        lines.append(("heads", ", ".join(info.heads)))
    return [*lines, ("its licence", info.licence)] if info.licence else lines


def _capability_lines(facts: ModelFacts) -> list[tuple[str, str]]:
    """What a loaded model can do, for people."""
    can = facts.capabilities
    able = "drafts can be verified" + (", trees too" if can.tree else f", no trees: {can.reason}")
    return [
        ("can do", able if can.rollback else f"plain decoding only: {can.reason}"),
        ("takes back", facts.rollback),
    ]


def _draft_lines(options: Sequence[DraftOption], choice: DraftChoice) -> list[tuple[str, str]]:
    """Which models can draft, and which of them `auto` takes, for people."""
    lines = []
    for option in options[:_MOST_DRAFTS]:
        here = "" if option.path else ", not on this machine"
        form = ", MLX" if option.format == "mlx" else ""
        sizes = f"{_count_text(option.parameters)} parameters, {format_bytes(option.size_bytes)}{form}"
        known = "assumed" if option.acceptance is None else "measured"
        gain = f"about {option.speedup:.1f}x may be expected, {known}{here}"
        lines.append(("can draft", f"{option.reference}: {option.tokens}, {sizes}; {gain}"))
    if len(options) > _MOST_DRAFTS:
        lines.append(("can draft", f"and {len(options) - _MOST_DRAFTS} more"))
    taken = f"{choice.draft.name}: " if choice.draft else "none: "
    return [*lines, ("--draft auto", taken + choice.why)]
