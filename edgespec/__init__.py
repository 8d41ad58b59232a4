"""edgespec runs the largest model that fits your machine, as fast as possible, with unchanged output.

import edgespec

with edgespec.load("demo") as runtime:
    print(runtime.generate("How do I list files by size?", max_tokens=200).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.assembly.loading import load
    from edgespec.assembly.preview import Preview, plan
    from edgespec.backends.base import Capabilities, ModelFacts
    from edgespec.chat.message import Message
    from edgespec.conversation import Chat
    from edgespec.engine.sampling_params import SamplingParams
    from edgespec.engine.stats import Stats
    from edgespec.errors import EdgespecError
    from edgespec.load_options import LoadArguments
    from edgespec.memory.plan import MemoryPlan
    from edgespec.memory.prefix_cache.cache import PrefixCacheUsage
    from edgespec.reply import MethodReport, Reply, TextChunk
    from edgespec.reply_options import ReplyArguments
    from edgespec.request_queue import QueuedReply, RequestQueue
    from edgespec.runtime import MemoryUse, Runtime
    from edgespec.saved_data import delete_data
    from edgespec.stream import ReplyStream

__all__ = [
    "Capabilities",
    "Chat",
    "EdgespecError",
    "LoadArguments",
    "MemoryPlan",
    "MemoryUse",
    "Message",
    "MethodReport",
    "ModelFacts",
    "PrefixCacheUsage",
    "Preview",
    "QueuedReply",
    "Reply",
    "ReplyArguments",
    "ReplyStream",
    "RequestQueue",
    "Runtime",
    "SamplingParams",
    "Stats",
    "TextChunk",
    "__version__",
    "delete_data",
    "load",
    "plan",
]

__version__ = "0.1.0"

_HOMES = {
    "Capabilities": "edgespec.backends.base",
    "Chat": "edgespec.conversation",
    "EdgespecError": "edgespec.errors",
    "PrefixCacheUsage": "edgespec.memory.prefix_cache.cache",
    "MemoryPlan": "edgespec.memory.plan",
    "MemoryUse": "edgespec.runtime",
    "Message": "edgespec.chat.message",
    "MethodReport": "edgespec.reply",
    "ModelFacts": "edgespec.backends.base",
    "TextChunk": "edgespec.reply",
    "Preview": "edgespec.assembly.preview",
    "QueuedReply": "edgespec.request_queue",
    "LoadArguments": "edgespec.load_options",
    "Reply": "edgespec.reply",
    "ReplyArguments": "edgespec.reply_options",
    "ReplyStream": "edgespec.stream",
    "RequestQueue": "edgespec.request_queue",
    "Runtime": "edgespec.runtime",
    "SamplingParams": "edgespec.engine.sampling_params",
    "Stats": "edgespec.engine.stats",
    "delete_data": "edgespec.saved_data",
    "load": "edgespec.assembly.loading",
    "plan": "edgespec.assembly.preview",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import edgespec` and `edgespec --help` are fast."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'edgespec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
