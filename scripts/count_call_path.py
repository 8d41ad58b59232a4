#!/usr/bin/env python3
"""Count the functions of edgespec that run between a chat message and the target's first pass.

    scripts/count_call_path.py                        # the numbers, with the model `demo`
    scripts/count_call_path.py --list MODEL.gguf      # also each function, in the order of its first call

The third message of a chat is sent through the chat's model thread, so that caches are warm and the
conversation has replies. Two numbers are printed: up to the first call of the loaded target, and up to the
end of its first llama.cpp pass, which includes the backend. Lambdas and comprehensions do not count.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import edgespec
from edgespec.tui.worker import Ask, ModelThread

_ROOT = f"{Path(edgespec.__file__).parent}{os.sep}"
_MESSAGES = ("Hello, how are you?", "Name three fruits.", "And one vegetable?")
# Methods of `LanguageModel` that run the target.
_PASSES = ("prefill_prompt", "prefill", "verify")


class CallPath:
    """Records the functions that run until the first pass ends, in this thread and those started later.

    Attributes:
        callers: Each function, as its module and name, and the function that called it first.
        before_target: Number of functions before the first call of the target. None until that call.
    """

    def __init__(self) -> None:
        self.callers: dict[tuple[str, str], tuple[str, str]] = {}
        self.before_target: int | None = None
        self._is_recording = False
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def start(self) -> None:
        """Start recording."""
        self._is_recording = True

    def _on_event(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self._is_recording or threading.current_thread().name == "edgespec-idle":
            return
        called = _name(frame)
        if called is None:
            return
        if event == "return" and called[1] == "LlamaContext._decode":
            self._is_recording = False
        elif event == "call" and not called[1].endswith(">"):
            is_pass = called[0].startswith("backends") and frame.f_code.co_name in _PASSES
            if is_pass and self.before_target is None:
                self.before_target = len(self.callers)
            self.callers.setdefault(called, _caller(frame))


def _name(frame: FrameType) -> tuple[str, str] | None:
    """Return the module and the name of a function of edgespec, or None for any other function."""
    file = frame.f_code.co_filename
    return (file.removeprefix(_ROOT), frame.f_code.co_qualname) if file.startswith(_ROOT) else None


def _caller(frame: FrameType) -> tuple[str, str]:
    """Return the nearest function of edgespec that led to a call."""
    above = frame.f_back
    while above and (_name(above) is None or above.f_code.co_name.startswith("<")):
        above = above.f_back
    return (above and _name(above)) or ("", threading.current_thread().name)


def record_reply(model: str) -> CallPath:
    """Return the functions that the third message of a chat runs."""
    path, messages = CallPath(), []
    thread = ModelThread(lambda progress: edgespec.load(model, prefix_cache="memory", progress=progress))
    thread.start().result()
    for text in _MESSAGES:
        messages.append(edgespec.Message("user", text))
        ask = Ask("You are helpful.", tuple(messages), {"max_tokens": 12, "temperature": 0.0})
        if text == _MESSAGES[-1]:
            path.start()
        answer = thread.ask(ask).result().message
        assert answer is not None
        messages.append(answer)
    thread.close()
    thread.join(60)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo", help="a model that llama.cpp runs")
    parser.add_argument("--list", action="store_true", help="list the functions")
    arguments = parser.parse_args()
    path = record_reply(arguments.model)
    calls = list(path.callers)
    if arguments.list:
        for number, (module, name) in enumerate(calls, 1):
            print(f"{number:4}  {module:38} {name:45} < {path.callers[module, name][1]}")
    for label, count in (
        ("up to the first call of the target", path.before_target),
        ("up to the end of its first pass", len(calls)),
    ):
        modules = {module for module, _ in calls[:count]}
        print(f"{label}: {count} functions in {len(modules)} modules")


if __name__ == "__main__":
    main()
