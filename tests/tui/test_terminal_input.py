"""Bytes that a terminal can send: text in other encodings, and pasted control characters."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from textual import events
from textual.message import Message

from edgespec.tui.textual_guards import InputParser, pasted_text

PASTE = "\x1b[200~{}\x1b[201~"
# A chat's app is too slow to start for this test, so this app reads keys with the same driver and guard.
PROGRAM = """
import sys
from textual.app import App
from edgespec.tui.textual_guards import guard_input

log = open(sys.argv[1], "a", buffering=1)

class Probe(App):
    def on_mount(self):
        log.write("ready\\n")
    def on_key(self, event):
        if event.key == "q":
            self.exit()
        log.write(f"key {ascii(event.character)}\\n")
    def on_paste(self, event):
        log.write(f"paste {ascii(event.text)}\\n")

app = Probe()
guard_input(app.driver_class)
app.run()
sys.exit(app.return_code)
"""


def parsed(*reads: str) -> list[tuple[str, str | None]]:
    """Return the keys and pasted text in the terminal's input."""
    parser = InputParser()
    found: list[Message] = [event for data in reads for event in parser.feed(data)]
    return [
        ("paste", each.text) if isinstance(each, events.Paste) else ("key", each.character)
        for each in found
        if isinstance(each, events.Paste | events.Key)
    ]


class TestPastedText:
    @pytest.mark.parametrize(
        ("pasted", "expected"),
        [
            ("plain \u202e\u00e9 text", "plain \u202e\u00e9 text"),
            ("two\r\nlines\rand\n\tmore", "two\nlines\nand\n\tmore"),
            ("\x1b[1;31mred\x1b[0m and \x1b]0;title\x07\x1b]8;;http://x\x1b\\link", "red and link"),
            ("\x07\x00\x1b\x7f\x9b\x03\x1a\x1b[", "["),
            ("", ""),
        ],
    )
    def test_only_text_remains(self, pasted: str, expected: str) -> None:
        assert pasted_text(pasted) == expected
        assert parsed(PASTE.format(pasted), "a") == [("paste", expected), ("key", "a")]

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
    def test_reads_of_any_size(self, size: int) -> None:
        sent = "a" + PASTE.format("one\x1b[31m\rtwo\x1b[20") + "b" + PASTE.format("\x07three") + "c"
        reads: Sequence[str] = [sent[start : start + size] for start in range(0, len(sent), size)]
        expected = [("key", "a"), ("paste", "one\ntwo[20"), ("key", "b"), ("paste", "three"), ("key", "c")]
        assert parsed(*reads) == expected


def test_enter_before_the_chat_has_started_is_enter() -> None:
    """The terminal still converts it to a line feed, which is Ctrl+J, the key for a new line."""
    assert parsed("a\nb", "c\nd") == [
        ("key", "a"), ("key", "\r"), ("key", "b"), ("key", "c"), ("key", "\n"), ("key", "d")
    ]  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudoterminals of this kind")
def test_no_byte_closes_the_chat(tmp_path: Path) -> None:
    """Invalid UTF-8 arrives as U+FFFD, and pasted control characters do nothing."""
    master, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    log = tmp_path / "log"
    log.touch()
    arguments = [sys.executable, "-c", PROGRAM, str(log)]
    process = subprocess.Popen(arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    try:
        sent = False
        while process.poll() is None:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    os.read(master, 1 << 16)
                except OSError:
                    break
            if not sent and "ready" in log.read_text():
                sent = True
                os.write(master, b"\xe9a\x1b[200~b\xff\xfe\x1b[31mc\x07\rd\x1b[201~q")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)
    assert log.read_text().splitlines() == [
        "ready",
        "key '\\ufffd'",
        "key 'a'",
        "paste 'b\\ufffd\\ufffdc\\nd'",
        "key 'q'",
    ]
