"""Load a GGUF model in this process, generate a few tokens, and print the peak of its memory as JSON."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import psutil

import edgespec
from edgespec.model.formats.gguf_header import read_header
from scripts.gpu_checking.gpu import used_bytes

_ROOT = Path(__file__).resolve().parents[2]
_PROMPT_TOKENS, _REPLY_TOKENS = 600, 32
_POLL_SECONDS = 0.02


def layers_to_offload(path: str, share: str) -> int | None:
    """Return `gpu_layers` for `all`, `half` or `0` of the layers of a model. None means all."""
    if share == "half":
        return int(str(read_header(Path(path)).architecture_value("block_count"))) // 2
    return None if share == "all" else int(share)


class PeakMemory:
    """Polls memory use in a background thread.

    Reads the memory used on all NVIDIA cards if `on_cards` is true, and the memory of this process otherwise.

    Attributes:
        before: Used bytes at the start.
        peak: The highest number of used bytes so far.
    """

    def __init__(self, *, on_cards: bool) -> None:
        self._used = used_bytes if on_cards else lambda: int(psutil.Process().memory_info().rss)
        self.before = self.peak = self._used()
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


def main() -> None:
    """Measure the model that the command line names: TARGET DRAFT all|half|0 cuda|metal|cpu."""
    target, draft, share, kind = sys.argv[1:]
    gpu_layers = layers_to_offload(target, share)
    # The first model also loads the libraries and creates the CUDA context, which the plan leaves out.
    demo = str(_ROOT / "models" / "demo-target-q8_0.gguf")
    with edgespec.load(demo, "none", method="none", prefix_cache="none", gpu_layers=gpu_layers) as runtime:
        list(runtime.stream_tokens(range(5, 105), max_tokens=2))
    memory = PeakMemory(on_cards=kind == "cuda")
    with edgespec.load(
        target,
        draft,
        method="none" if draft == "none" else "model",
        prefix_cache="none",
        reserve_full_context=True,
        gpu_layers=gpu_layers,
    ) as runtime:
        prompt = [5 + 7 * i % 199 for i in range(min(_PROMPT_TOKENS, runtime.context_tokens // 2))]
        list(runtime.stream_tokens(prompt, max_tokens=_REPLY_TOKENS))
        measured = memory.stop()
    print(json.dumps({"gpu_layers": gpu_layers, "measured_bytes": measured}))


if __name__ == "__main__":
    main()
