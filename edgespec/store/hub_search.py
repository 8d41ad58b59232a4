"""Search Hugging Face for models, fetching only their metadata."""

from __future__ import annotations

from typing import Any

from edgespec.errors import DownloadError
from edgespec.store.catalogue import ModelEntry, load_catalogue

__all__ = ["search_hub"]

# The quantisation that edgespec downloads by default, and its average number of bits per weight.
_QUANTISATION, _BITS = "Q4_K_M", 4.85
# Timeout in seconds for a search, kept short because the user is waiting.
_TIMEOUT_SECONDS = 10.0


def search_hub(text: str, limit: int = 20) -> list[ModelEntry]:
    """Return catalogue entries for the GGUF models on Hugging Face that match a query.

    Args:
        text: Words to look for in repository names, such as `qwen coder`.
        limit: Maximum number of results.

    Returns:
        The entries, most downloaded first. Sizes are estimated from the parameter count, or 0 if it is
        unknown.

    Raises:
        DownloadError: The hub cannot be reached or rejects the search.
    """
    import httpx2
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled

    params: dict[str, str | int | list[str]] = {
        "search": text,
        "filter": "gguf",
        "sort": "downloads",
        "limit": limit,
        "expand": ["gguf", "gated"],
    }
    try:
        # Do not use `HfApi.list_models`, which retries for half a minute if the hub is unreachable.
        response = get_session().get(
            f"{constants.ENDPOINT}/api/models", params=params, timeout=_TIMEOUT_SECONDS
        )
        response.raise_for_status()
        return [
            _entry(each["id"], each.get("gguf") or {}, bool(each.get("gated"))) for each in response.json()
        ]
    except OfflineModeIsEnabled as error:
        raise _failed("offline mode is on (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE", "offline") from error
    except httpx2.HTTPStatusError as error:
        raise _failed(
            f"{constants.ENDPOINT} answered with status {error.response.status_code}", "try again later"
        ) from error
    except httpx2.HTTPError as error:
        raise _failed(
            f"{constants.ENDPOINT} cannot be reached",
            "check your network connection and try again",
            "network_unreachable",
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _failed(
            f"{constants.ENDPOINT} does not seem to be a Hugging Face server",
            "check HF_ENDPOINT and your proxy settings",
        ) from error


def _failed(reason: str, next_step: str, code: str = "") -> DownloadError:
    return DownloadError(f"cannot search Hugging Face: {reason}", next_step, code=code)


def _entry(repository: str, facts: dict[str, Any], is_gated: bool) -> ModelEntry:
    """Create a catalogue entry for a repository. `facts` is the hub's metadata for one of its GGUF files."""
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
        notice=f"you must first accept its licence at huggingface.co/{repository}" if is_gated else "",
        is_gated=is_gated,
    )
