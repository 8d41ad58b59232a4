"""Load a GGUF model in this process, generate a few tokens, and print the peak of its memory as JSON."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import edgespec
from edgespec.model.formats.gguf_header import read_header
from scripts.gpu_checking.gpu import used_bytes

_ROOT = Path(__file__).resolve().parents[2]
# Number of prompt tokens. If a device needs longer than this for a short prompt, it gets only a short one.
_PROMPT_TOKENS, _SHORT_PROMPT_TOKENS, _FAST_SECONDS = 600, 100, 1.0
_REPLY_TOKENS = 16
_POLL_SECONDS = 0.02
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_VULKAN_LINE = re.compile(
    r"^ggml_vulkan memory: (\S+): .*Total device: ([\d.]+) (\w+), total host: ([\d.]+) (\w+)", re.MULTILINE
)


def layers_to_offload(path: str, share: str) -> int | None:
    """Return `gpu_layers` for `all`, `half` or a number of the layers of a model. None means all."""
    if share == "half":
        return int(str(read_header(Path(path)).architecture_value("block_count"))) // 2
    return None if share == "all" else int(share)


class PeakMemory:
    """Polls memory use in a background thread.

    Args:
        used_bytes: Returns the bytes in use.

    Attributes:
        before: Used bytes at the start.
        peak: The highest number of used bytes so far.
    """

    def __init__(self, used_bytes: Callable[[], int]) -> None:
        self._used = used_bytes
        self.before = self.peak = used_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self.peak = max(self.peak, self._used())

    def stop(self) -> int:
        """Stop polling, and return the growth from the start to the peak in bytes."""
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._used())
        return self.peak - self.before


class VulkanLog:
    """The memory that llama.cpp's Vulkan backend allocates, which it logs to this process's standard error.

    Create it before llama.cpp is loaded. Later errors are not shown.
    """

    def __init__(self) -> None:
        os.environ["GGML_VK_MEMORY_LOGGER"] = "1"
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115  # in use until the process ends
        os.dup2(self._file.fileno(), sys.stderr.fileno())

    def used_bytes(self) -> int:
        """Return the allocated bytes, including main memory that the GPUs can read."""
        self._file.seek(0)
        return parse_vulkan_log(self._file.read())


def parse_vulkan_log(text: str) -> int:
    """Return the bytes that are allocated on all GPUs after the last line of a log."""
    totals = {}
    for gpu, *sizes in _VULKAN_LINE.findall(text):
        totals[gpu] = sum(float(sizes[i]) * _UNITS[sizes[i + 1]] for i in (0, 2))
    return round(sum(totals.values()))


def memory_counter(kind: str) -> Callable[[], int]:
    """Return a function that returns the memory in use on the GPUs or, without a GPU, by this process."""
    if kind == "cuda":
        return used_bytes
    if kind == "vulkan":
        return VulkanLog().used_bytes
    return lambda: int(psutil.Process().memory_info().rss)


def main() -> None:
    """Measure the model given on the command line: TARGET DRAFT all|half|N cuda|vulkan|metal|cpu."""
    target, draft, share, kind = sys.argv[1:]
    used = memory_counter(kind)
    gpu_layers = layers_to_offload(target, share)
    # The first model also loads the libraries and creates the CUDA context, which the plan leaves out.
    demo = str(_ROOT / "models" / "demo-target-q8_0.gguf")
    options: dict[str, Any] = {
        "prefix_cache": "none",
        "exactness": "off",
        "measure_costs": False,
        "gpu_layers": gpu_layers,
    }
    with edgespec.load(demo, "none", method="none", context=512, **options) as runtime:
        list(runtime.stream_tokens(range(5, 105), max_tokens=2))
        start = time.monotonic()
        list(runtime.stream_tokens(range(6, 6 + _SHORT_PROMPT_TOKENS), max_tokens=1))
        is_fast = time.monotonic() - start < _FAST_SECONDS
    memory = PeakMemory(used)
    with edgespec.load(
        target,
        draft,
        method="none" if draft == "none" else "model",
        reserve_full_context=True,
        **options,
    ) as runtime:
        tokens = _PROMPT_TOKENS if is_fast else _SHORT_PROMPT_TOKENS
        prompt = [5 + 7 * i % 199 for i in range(min(tokens, runtime.context_tokens // 2))]
        list(runtime.stream_tokens(prompt, max_tokens=_REPLY_TOKENS))
        measured = memory.stop()
    print(json.dumps({"gpu_layers": gpu_layers, "measured_bytes": measured}))


if __name__ == "__main__":
    main()
