"""Ollama's endpoints for listing, describing and pulling models."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from edgespec.server.endpoint import Call, endpoint
from edgespec.server.errors import ApiError
from edgespec.server.fields import Ignored, RequestFields
from edgespec.server.models import KnownModel
from edgespec.server.ollama.replies import RENAMED
from edgespec.server.responses import json_response

__all__ = ["list_loaded", "list_models", "pull_model", "show_model"]


class ModelDetails(TypedDict):
    """Properties of a model. Unknown properties and `parent_model`, which clients require, are empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelTag(TypedDict):
    """A model that requests can name."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelTags(TypedDict):
    """The models that requests can name."""

    models: list[ModelTag]


class RunningModel(ModelTag):
    """A loaded model. `size` is its total memory in bytes, and `size_vram` the part on GPUs."""

    size_vram: int
    context_length: int


class LoadedModels(TypedDict):
    """The loaded models."""

    models: list[RunningModel]


class ShowRequest(RequestFields):
    """The body of a request to describe a model."""

    model: str | None = Field(default=None, description="The model. Defaults to the server's own model.")
    name: str | None = Field(default=None, description="An older name for the field model.")
    verbose: Ignored


class PullRequest(ShowRequest):
    """The body of a request to pull a model."""

    stream: Ignored
    insecure: Ignored


class PulledModel(TypedDict):
    """The result of pulling a model. The status is always `success`."""

    status: str


class ShownModel(TypedDict):
    """A description of a model. `modelfile` and `template` are always empty, but clients require them.

    `parameters` are the sampling settings that the model's makers recommend, one per line, as in Ollama.
    """

    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]


@endpoint("GET", "/api/tags", response=ModelTags)
async def list_models(call: Call[None]) -> Response:
    """List the models on this machine, starting with the server's own."""
    tags: ModelTags = {"models": [_tag(known) for known in await call.service.models.known()]}
    return json_response(tags)


@endpoint("GET", "/api/ps", response=LoadedModels)
async def list_loaded(call: Call[None]) -> Response:
    """List the loaded models."""
    loaded: LoadedModels = {"models": []}
    for known in await call.service.models.known():
        if known.loaded:
            plan = known.loaded.runtime.plan
            card_bytes = plan.planned_bytes("gpu") if plan else 0
            size = known.loaded.memory_bytes + card_bytes
            context = known.loaded.runtime.context_tokens
            loaded["models"].append(
                {**_tag(known), "size": size, "size_vram": card_bytes, "context_length": context}
            )
    return json_response(loaded)


@endpoint("POST", "/api/show", ShowRequest, ShownModel)
async def show_model(call: Call[ShowRequest]) -> Response:
    """Describe a model."""
    return json_response(_shown(await call.service.models.describe(call.body.model or call.body.name)))


@endpoint("POST", "/api/pull", PullRequest, PulledModel)
async def pull_model(call: Call[PullRequest]) -> Response:
    """Check whether a model is on this machine, for programs that pull their model on startup.

    Raises:
        ApiError: There is no such model. The server does not download models.
    """
    name = call.body.model or call.body.name
    found = await call.service.models.find(name, prepare=False)
    if name and found.name != name:
        raise ApiError(
            404,
            f"there is no model named {name[:100]} on this machine, and the server does not download models;"
            f" use `edgespec models pull` there, or the model {found.name}",
            code="model_not_found",
        )
    result: PulledModel = {"status": "success"}
    return json_response(result)


def _shown(known: KnownModel) -> ShownModel:
    info = known.info
    architecture = info.architecture if info else ""
    trained = info.context_tokens if info else 0
    # Clients shorten conversations to this length, so report the loaded model's context if there is one.
    context = known.loaded.runtime.context_tokens if known.loaded else trained
    return {
        "modelfile": "",
        "parameters": _parameters(known),
        "template": "",
        "modified_at": _time(known),
        "details": _details(known),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": known.name,
            "general.parameter_count": info.parameters if info else 0,
            f"{architecture}.context_length": context,
        },
        # edgespec describes tools in the system prompt if the chat template does not.
        "capabilities": [
            "completion",
            *(["tools"] if info and info.chat_template else []),
            *(["vision"] if known.loaded and known.loaded.runtime.target.sees_images else []),
        ],
    }


def _parameters(known: KnownModel) -> str:
    names = {own: name for name, own in RENAMED.items()}
    return "\n".join(
        f"{names.get(name, name):<30} {setting.value:g}" for name, setting in known.recommended.items()
    )


def _tag(known: KnownModel) -> ModelTag:
    size = known.info.size_bytes if known.info else 0
    return {
        "name": known.name,
        "model": known.name,
        "modified_at": _time(known),
        "size": size,
        # Clients show only the beginning of this hash. Hash the metadata, because hashing the whole file
        # would take minutes.
        "digest": hashlib.sha256(f"{known.name} {known.created} {size}".encode()).hexdigest(),
        "details": _details(known),
    }


def _time(known: KnownModel) -> str:
    return datetime.fromtimestamp(known.created, UTC).isoformat()


def _details(known: KnownModel) -> ModelDetails:
    info = known.info
    family = info.architecture if info else ""
    return {
        "parent_model": "",
        "format": known.format,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _count_text(info.parameters) if info else "",
        "quantization_level": info.quantisation if info else "",
    }


def _count_text(count: int) -> str:
    """Format a parameter count the way Ollama does, such as `8.0B`."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
