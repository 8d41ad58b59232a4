"""Search Hugging Face for models. Reads only descriptions, and downloads no model files."""

from __future__ import annotations

from typing import Any

from edgespec.catalog.catalogue import ModelEntry, load_catalogue
from edgespec.catalog.download import translate_errors
from edgespec.errors import DownloadError

__all__ = ["search_hub"]

# Quantisation that is downloaded from a repository by default, and its average number of bits per weight.
_QUANTISATION, _BITS = "Q4_K_M", 4.85


def search_hub(text: str, limit: int = 20) -> list[ModelEntry]:
    """Return entries like those of the catalogue for the GGUF models on Hugging Face that match a text.

    Args:
        text: Words that the repository's name contains, such as `qwen coder`.
        limit: Maximum number of results.

    Returns:
        The entries, most downloaded first. Their sizes are estimated from the number of parameters, and are 0
        if the hub does not know it.

    Raises:
        DownloadError: The hub cannot be reached, or refuses the search.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    with translate_errors(f"the search for {text!r}"):
        try:
            found = HfApi().list_models(
                search=text,
                filter="gguf",
                sort="downloads",
                limit=limit,
                expand=["gguf", "gated"],
            )
            return [_entry(each.id, each.gguf or {}, bool(each.gated)) for each in found]
        except OfflineModeIsEnabled as error:
            raise DownloadError(
                "Hugging Face cannot be searched, because offline mode is on", "unset HF_HUB_OFFLINE"
            ) from error


def _entry(repository: str, facts: dict[str, Any], is_gated: bool) -> ModelEntry:
    """Return the entry of a repository. `facts` is what the hub has read from one of its GGUF files."""
    if known := load_catalogue().of_repository(repository):
        return known
    parameters = int(facts.get("total") or 0)
    return ModelEntry(
        name=f"hf:{repository}",
        family=str(facts.get("architecture", "")),
        parameters=parameters,
        quantisation=_QUANTISATION,
        context_tokens=int(facts.get("context_length") or 0),
        approximate_file_bytes=round(parameters * _BITS / 8),
        licence="",
        chat_template="",
        gguf_repository=repository,
        notice=f"its licence must be accepted at huggingface.co/{repository} first" if is_gated else "",
    )
