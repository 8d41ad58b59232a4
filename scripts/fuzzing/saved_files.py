"""Fuzz the files that edgespec saves: chats, the prefix cache, settings and aliases."""

from __future__ import annotations

import io
import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np

from edgespec.chat.store import ChatStore
from edgespec.cli.help import COMMANDS
from edgespec.cli.settings import Settings
from edgespec.errors import EdgespecError, OptionError
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk, encode_header, read_header
from edgespec.memory.prefix_cache.store import name_of, tokens_digest
from edgespec.model.base import Snapshot
from edgespec.options.settings import SETTINGS, setting_value
from edgespec.options.settings_file import NotEditableError, changed
from edgespec.store.aliases import check_alias, check_pair
from edgespec.store.catalogue import load_catalogue, user_aliases, user_pairs
from edgespec.store.reference import resolve
from edgespec.tui.open_chat import OpenChat
from scripts.fuzzing.mutations import NASTY_INTEGERS, damage, damage_json, nasty_text, nested_json, several
from scripts.fuzzing.worker import Files

_CHAT = {
    "version": 1,
    "id": "chat",
    "title": "How do I list files?",
    "created": "2026-11-23T10:00:00+00:00",
    "updated": "2026-11-23T10:01:00.123456+00:00",
    "target": "demo",
    "system": "You are a helper.",
    "messages": [
        {"role": "user", "content": "How do I list files by size?"},
        {"role": "assistant", "content": "Use `ls -S`.", "reasoning": "The user wants a list."},
        {"role": "user", "content": "And by name?"},
        {"role": "assistant", "content": "Use `ls`."},
    ],
    "sampling": {"temperature": 0.7, "top_k": 40, "stop": ["a", "b"], "seed": 1, "stream": True},
}
_IDENTITY = "0123456789abcdef" * 4
_QUOTA_BYTES = 1 << 20
# States of two heads.
_HEADS = {"a head": bytes(range(100)), "another head": b""}
_SETTING_VALUES = (
    "true",
    "-1",
    "0.7",
    "'8GiB'",
    '"auto"',
    "[1, 2]",
    "{a = 1}",
    "2026-11-23",
    "nan",
    "1e400",
    "0x10",
    '""',
)
_REFERENCES = (
    "demo",
    "a/b",
    "hf:a/b:Q4_K_M",
    "ollama:a:b",
    "lmstudio:a/b",
    "8b-q4",
    "./x.gguf",
    "a",
    "b",
    "name:tag",
    "/",
)


class Chat:
    """Chats: damaged JSON, sometimes with a second file whose name is unusual."""

    @staticmethod
    def make(rng: Random) -> Files:
        messages = [{"role": rng.choice(("user", "assistant")), "content": nasty_text(rng)} for _ in range(3)]
        chat: dict[str, object] = {**_CHAT, "title": nasty_text(rng), "messages": messages}
        if rng.random() < 0.7:
            chat = several(rng, chat, damage_json)
        text = nested_json(rng, chat)
        if rng.random() < 0.2:
            text = several(rng, text, damage)
        files = {"chats/chat.json": text}
        if rng.random() < 0.1:
            name = "".join(
                letter for letter in nasty_text(rng) if letter.isprintable() and letter not in "/."
            )[:50]
            files[f"chats/{name}x.json"] = text
        return files

    @staticmethod
    def run(folder: Path) -> None:
        """List the chats, open one, and check that saving it again does not change it."""
        store = ChatStore(folder / "chats")
        store.list()
        chat = store.load("chat")
        OpenChat.opened(chat, {})
        store.save(chat)
        again = store.load("chat")
        assert _as_saved(chat.to_json()) == _as_saved(again.to_json()), "the saved chat differs"


def _as_saved(value: object) -> bytes:
    # UTF-8 cannot encode lone surrogates, so they are saved as question marks.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


class PrefixCacheFiles:
    """The prefix cache: wrong values with correct checksums, and damaged bytes."""

    @staticmethod
    def make(rng: Random) -> Files:
        files = dict(_segments())
        name = rng.choice(sorted(files))
        data = files[name]
        if rng.random() < 0.6:
            stream = io.BytesIO(data)
            header = several(rng, read_header(stream), damage_json)
            data = encode_header(header) + stream.read()
        if rng.random() < 0.6:
            data = several(rng, data, damage)
        del files[name]
        # Sometimes store a segment under another segment's name.
        files[rng.choice((name, name, name, "x.kept", *sorted(_segments())))] = data
        return {f"{_IDENTITY[:32]}/{each}": content for each, content in files.items()}

    @staticmethod
    def run(folder: Path) -> None:
        """List and read all segments, then write another one, which may delete some."""
        whole = _segments()
        disk = PrefixCacheDisk(_IDENTITY, _QUOTA_BYTES, folder)
        for segment in disk.list_segments():
            snapshot = disk.read(segment.name)
            if snapshot is not None:
                assert f"{segment.name}.kept" in whole, "a damaged segment was used"
                assert bytes(snapshot.data) == bytes(range(200)), "a damaged segment was used"
                assert snapshot.heads == _HEADS, "a damaged segment was used"
        tokens = np.arange(100, 110, dtype=np.int32)
        small = PrefixCacheDisk(_IDENTITY, 2000, folder)
        small.write(name_of(tokens, 0), "", tokens, Snapshot(10, bytes(300), 0), 1.0)
        small.list_segments()


@cache
def _segments() -> dict[str, bytes]:
    """Return the files of two segments, the second of which extends the first."""
    tokens = np.arange(50, dtype=np.int32)
    with TemporaryDirectory() as name:
        disk = PrefixCacheDisk(_IDENTITY, _QUOTA_BYTES, Path(name))
        for start, end in ((0, 30), (30, 50)):
            snapshot = Snapshot(end, bytes(range(200)), start, _HEADS)
            disk.write(
                name_of(tokens[:end], start), tokens_digest(tokens[:start]), tokens[start:end], snapshot, 1.0
            )
        return {path.name: path.read_bytes() for path in sorted(disk.folder.iterdir())}


class SettingsFile:
    """Settings: TOML that every command reads and `edgespec config set` edits."""

    @staticmethod
    def make(rng: Random) -> Files:
        lines = [_settings_line(rng) for _ in range(rng.randrange(8))]
        if rng.random() < 0.05:
            depth = rng.choice((100, 1_000, 10_000))
            lines.append(
                rng.choice(
                    ("target = " + "[" * depth + "]" * depth, "a." * depth + "b = 1", "a = " + "{b=" * depth)
                )
            )
        text = "\n".join(lines).encode("utf-8", "surrogatepass")
        return {"config.toml": several(rng, text, damage) if rng.random() < 0.4 else text}

    @staticmethod
    def run(folder: Path) -> None:
        """Read the settings, then set and remove a setting in the file's text."""
        os.environ["EDGESPEC_CONFIG_DIR"] = str(folder)
        settings = Settings.read()
        text = (folder / "config.toml").read_bytes().decode("utf-8", "replace")
        if not settings.problems:
            with suppress(NotEditableError):
                changed(changed(text, ("chat", "temperature"), "0.5"), ("chat", "temperature"), None)
        for line in text.splitlines()[:3]:
            with suppress(OptionError):
                setting_value("temperature", line)
        for problem in settings.problems:
            raise problem


def _settings_line(rng: Random) -> str:
    name = rng.choice((*SETTINGS, *COMMANDS, "aliases", "pairs", "unknown"))
    kind = rng.randrange(6)
    if kind == 0:
        return f"[{name}]"
    if kind == 1:
        return f"# {nasty_text(rng)}"
    value = rng.choice(
        (rng.choice(_SETTING_VALUES), str(rng.choice(NASTY_INTEGERS)), json.dumps(nasty_text(rng)))
    )
    return f"{'chat.' * (kind == 2)}{name if kind < 5 else json.dumps(nasty_text(rng))} = {value}"


class Aliases:
    """Aliases and pairs of models: TOML with chains, cycles, unusual names and damage."""

    @staticmethod
    def make(rng: Random) -> Files:
        lines: list[str] = []
        for table in rng.choice((["aliases"], ["pairs"], ["aliases", "pairs"], ["aliases", "aliases"])):
            lines.append(f"[{table}]")
            for _ in range(rng.randrange(6)):
                name, value = (
                    rng.choice(_REFERENCES) if rng.random() < 0.7 else nasty_text(rng) for _ in range(2)
                )
                lines.append(f"{json.dumps(name)} = {json.dumps(value) if rng.random() < 0.9 else '[{}]'}")
        if rng.random() < 0.05:
            lines.append("a = " + "[" * rng.choice((100, 1_000, 10_000)))
        text = "\n".join(lines).encode("utf-8", "surrogatepass")
        return {"aliases.toml": several(rng, text, damage) if rng.random() < 0.4 else text}

    @staticmethod
    def run(folder: Path) -> None:
        """Read the file, and resolve every name and reference in it without downloading."""
        os.environ["EDGESPEC_CONFIG_DIR"] = str(folder)
        catalogue = load_catalogue()
        aliases, pairs = user_aliases(), user_pairs()
        problems: list[EdgespecError] = []
        for name, value in [*aliases.items(), *pairs.items()]:
            catalogue.find(name)
            catalogue.nearest(name[:100])
            for check in (check_alias, check_pair):
                with suppress(EdgespecError):
                    check(name, value)
            for reference in (name, value):
                try:
                    resolve(reference, allow_download=False)
                except EdgespecError as error:
                    problems.append(error)
        for problem in problems:
            raise problem
