"""Compile constraints in a child process, to find those that crash llguidance or take too long.

Reads one JSON array per line from stdin: the constraint's option, its text, and the CPU time limit in
seconds. For each constraint that compiles, prints the approximate size of the compiled constraint in bytes.
Exits when stdin is closed.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import suppress

__all__ = ["main"]

# Maximum address space of this process in bytes. Python and llguidance reserve about 220 MiB, of which they
# use only a sixth.
_MEMORY_BYTES = 384 << 20
# Stack size in bytes for compiling a constraint in this process. A constraint that fits here cannot overflow
# the threads that compile it later, because they have larger stacks. About 400 nested rules fit.
_STACK_BYTES = 2 << 20


def main() -> None:
    """Compile constraints until stdin is closed."""
    _limit_memory()
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_compile_all)
    thread.start()
    thread.join()


def _compile_all() -> None:
    import psutil
    from llguidance import LLTokenizer

    from edgespec.constraints.matcher import new_matcher

    tokenizer, process = LLTokenizer("byte"), psutil.Process()
    for line in sys.stdin:
        option, text, cpu_seconds = json.loads(line)
        before_bytes = process.memory_info().rss
        _limit_cpu_time(cpu_seconds)
        matcher = None
        with suppress(ValueError):
            matcher = new_matcher(option, text, tokenizer)
        _limit_cpu_time(0)
        # This estimate can be too low, because memory freed by an earlier constraint is reused.
        sys.stdout.write(f"{max(0, process.memory_info().rss - before_bytes)}\n")
        sys.stdout.flush()
        del matcher


def _limit_memory() -> None:
    if sys.platform != "win32":
        import resource

        # macOS does not support this limit.
        with suppress(OSError, ValueError):
            limit = (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1])
            resource.setrlimit(resource.RLIMIT_AS, limit)


def _limit_cpu_time(seconds: float) -> None:
    """Kill this process after `seconds` of CPU time, even during a native call. 0 removes the limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)
