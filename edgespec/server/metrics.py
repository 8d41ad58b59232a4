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
    "target_passes": "Forward passes of the model.",
    "prefill_seconds": "Time spent processing prompts.",
    "decode_seconds": "Time spent generating tokens.",
}
_STATS = tuple(_HELP)[2:]
_GAUGE_HELP = {
    "requests_waiting": "Requests that are waiting for a loaded model.",
    "prefix_cache_bytes": "Memory that the prefix cache of a loaded model uses.",
    "prefix_cache_limit_bytes": "Maximum memory of the prefix cache of a loaded model.",
}


class Metrics:
    """Counts requests and replies since the server was started. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._replies: Counter[str] = Counter()
        self._totals: dict[str, float] = dict.fromkeys(_STATS, 0)

    def count_request(self, path: str, status: int) -> None:
        """Count an HTTP request. `path` must be an endpoint's path, to bound the number of counters."""
        with self._lock:
            self._requests[path, status] += 1

    def count_reply(self, reply: Reply | None) -> None:
        """Count a finished reply and add its statistics. Pass None for a reply that failed."""
        with self._lock:
            self._replies[reply.finish_reason if reply else "failed"] += 1
            if reply:
                for name in _STATS:
                    self._totals[name] += getattr(reply.stats, name)

    def text(self, models: Mapping[str, Mapping[str, int]]) -> str:
        """Return all metrics in Prometheus's text format, given the gauges of each loaded model."""
        with self._lock:
            requests = {f'path="{path}",status="{code}"': n for (path, code), n in self._requests.items()}
            lines = _lines("requests", requests)
            lines += _lines("replies", {f'reason="{why}"': n for why, n in self._replies.items()})
            for name, total in self._totals.items():
                lines += _lines(name, {"": total})
        for name, meaning in _GAUGE_HELP.items():
            lines += [f"# HELP edgespec_{name} {meaning}", f"# TYPE edgespec_{name} gauge"]
            for model, gauges in models.items():
                lines.append(f'edgespec_{name}{{model="{_escaped(model)}"}} {gauges[name]}')
        return "\n".join(lines) + "\n"


def _lines(name: str, values: Mapping[str, float]) -> list[str]:
    metric = f"edgespec_{name}_total"
    rows = [
        f"{metric}{{{labels}}} {value}" if labels else f"{metric} {value}" for labels, value in values.items()
    ]
    return [f"# HELP {metric} {_HELP[name]}", f"# TYPE {metric} counter", *rows]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
