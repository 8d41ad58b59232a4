"""Run the largest model that fits your machine, as fast as possible and without changing its output.

import edgespec

with edgespec.load("demo") as runtime:
    print(runtime.generate("How do I list files by size?", max_tokens=200).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.api.conversation import Chat
    from edgespec.api.embedding import Embedding
    from edgespec.api.loading import load
    from edgespec.api.request_queue import QueuedEmbeddings, QueuedReply, RequestQueue
    from edgespec.api.runtime import Runtime
    from edgespec.api.saved_data import delete_data
    from edgespec.api.stream import ReplyStream
    from edgespec.attachments import attach
    from edgespec.chat.message import AttachedFile, Message, PlacedImage
    from edgespec.chat.tool_calls.calls import ToolCall, ToolCallDelta
    from edgespec.decode.reply import MethodReport, Reply, TextChunk, TokenLogprobs
    from edgespec.engine.sampling_params import SamplingParams
    from edgespec.engine.stats import Stats
    from edgespec.errors import EdgespecError
    from edgespec.loading.model_list import (
        AvailableModel,
        download_model,
        list_models,
        measure_speed,
        search_models,
    )
    from edgespec.loading.preview import Preview, plan
    from edgespec.memory.plan import MemoryPlan, MemoryUse
    from edgespec.memory.prefix_cache.cache import PrefixCacheUsage
    from edgespec.model.image import Image
    from edgespec.model.model_facts import Capabilities, Exactness, ModelFacts
    from edgespec.options.load_options import LoadArguments
    from edgespec.options.reply_options import ReplyArguments

__all__ = [
    "AttachedFile",
    "AvailableModel",
    "Capabilities",
    "Chat",
    "EdgespecError",
    "Embedding",
    "Exactness",
    "Image",
    "LoadArguments",
    "MemoryPlan",
    "MemoryUse",
    "Message",
    "MethodReport",
    "ModelFacts",
    "PlacedImage",
    "PrefixCacheUsage",
    "Preview",
    "QueuedEmbeddings",
    "QueuedReply",
    "Reply",
    "ReplyArguments",
    "ReplyStream",
    "RequestQueue",
    "Runtime",
    "SamplingParams",
    "Stats",
    "TextChunk",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "__version__",
    "attach",
    "delete_data",
    "download_model",
    "list_models",
    "load",
    "measure_speed",
    "plan",
    "search_models",
]

__version__ = "0.2.0"

_HOMES = {
    "edgespec.api.loading": ("load",),
    "edgespec.loading.model_list": (
        "AvailableModel",
        "download_model",
        "list_models",
        "measure_speed",
        "search_models",
    ),
    "edgespec.loading.preview": ("Preview", "plan"),
    "edgespec.attachments": ("attach",),
    "edgespec.model.image": ("Image",),
    "edgespec.model.model_facts": ("Capabilities", "Exactness", "ModelFacts"),
    "edgespec.chat.message": ("AttachedFile", "Message", "PlacedImage"),
    "edgespec.chat.tool_calls.calls": ("ToolCall", "ToolCallDelta"),
    "edgespec.api.conversation": ("Chat",),
    "edgespec.api.embedding": ("Embedding",),
    "edgespec.engine.sampling_params": ("SamplingParams",),
    "edgespec.engine.stats": ("Stats",),
    "edgespec.errors": ("EdgespecError",),
    "edgespec.options.load_options": ("LoadArguments",),
    "edgespec.memory.plan": ("MemoryPlan", "MemoryUse"),
    "edgespec.memory.prefix_cache.cache": ("PrefixCacheUsage",),
    "edgespec.decode.reply": ("MethodReport", "Reply", "TextChunk", "TokenLogprobs"),
    "edgespec.options.reply_options": ("ReplyArguments",),
    "edgespec.api.request_queue": ("QueuedEmbeddings", "QueuedReply", "RequestQueue"),
    "edgespec.api.runtime": ("Runtime",),
    "edgespec.api.saved_data": ("delete_data",),
    "edgespec.api.stream": ("ReplyStream",),
}


def __getattr__(name: str) -> Any:
    """Import public names lazily, to keep `import edgespec` and `edgespec --help` fast."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'edgespec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
