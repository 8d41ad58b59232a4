"""The server's counters, in Prometheus's text format."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from edgespec import Reply

__all__ = ["Metrics"]

_HELP = {
    "requests": "HTTP requests by path and status.",
    "replies": "Finished replies by finish reason; failed for replies that ended with an error.",
    "prompt_tokens": "Tokens in the prompts of replies.",
    "cached_prompt_tokens": "Prompt tokens that were reused from a cache.",
    "generated_tokens": "Tokens generated.",
    "drafted_tokens": "Tokens drafted.",
    "accepted_tokens": "Drafted tokens that the model accepted.",
    "target_passes": "Passes of the model.",
    "prefill_seconds": "Time spent processing prompts.",
    "decode_seconds": "Time spent generating tokens.",
}
_STATS = tuple(_HELP)[2:]


class Metrics:
    """Counts requests and replies since the server was started. Can be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._replies: Counter[str] = Counter()
        self._totals: dict[str, float] = dict.fromkeys(_STATS, 0)

    def count_request(self, path: str, status: int) -> None:
        """Count an HTTP request. `path` must be a path of an endpoint, to limit the number of counters."""
        with self._lock:
            self._requests[path, status] += 1

    def count_reply(self, reply: Reply | None) -> None:
        """Add the statistics of an ended reply. None stands for a reply that failed."""
        with self._lock:
            self._replies[reply.finish_reason if reply else "failed"] += 1
            if reply:
                for name in _STATS:
                    self._totals[name] += getattr(reply.stats, name)

    def text(self, waiting: Mapping[str, int]) -> str:
        """Return all metrics in Prometheus's text format.

        Args:
            waiting: Number of waiting requests for each loaded model.
        """
        with self._lock:
            requests = {f'path="{path}",status="{code}"': n for (path, code), n in self._requests.items()}
            lines = _lines("requests", requests)
            lines += _lines("replies", {f'reason="{why}"': n for why, n in self._replies.items()})
            for name, total in self._totals.items():
                lines += _lines(name, {"": total})
        lines += [
            "# HELP edgespec_requests_waiting Requests that wait for a loaded model.",
            "# TYPE edgespec_requests_waiting gauge",
            *(
                f'edgespec_requests_waiting{{model="{_escaped(model)}"}} {count}'
                for model, count in waiting.items()
            ),
        ]
        return "\n".join(lines) + "\n"


def _lines(name: str, values: Mapping[str, float]) -> list[str]:
    metric = f"edgespec_{name}_total"
    rows = [
        f"{metric}{{{labels}}} {value}" if labels else f"{metric} {value}" for labels, value in values.items()
    ]
    return [f"# HELP {metric} {_HELP[name]}", f"# TYPE {metric} counter", *rows]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
