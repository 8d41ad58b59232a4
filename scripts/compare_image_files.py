#!/usr/bin/env python3
"""Compare replies to unusual and damaged image files with those of llama-server, at temperature 0.

    scripts/build_llama_server ../llama
    scripts/compare_image_files.py --llama-server ../llama/llama-server
    scripts/compare_image_files.py --llama-server ../llama/llama-server --kinds llava --files turned,palette

Sends each file of tests/attachments/hostile_images.py to small random models of three kinds, like
compare_images.py. The columns are the ways in which edgespec gets the file:

python      the Python API with each method of compare_images.py, whose tokens must equal llama-server's
generate    `edgespec generate --image`
chat        `edgespec chat --plain` with @ and the file's name
others      the APIs of `edgespec serve`: OpenAI's two, Anthropic's and Ollama's

The other replies must equal the text of the Python API. `rejected` means that edgespec did not reply but gave
the same error as the Python API, once. `DIFFERENT` is anything else.

llama-server neither rotates photos according to their EXIF data nor reads WebP, so it gets such pictures as
upright PNG files with the same pixels.

Exits with status 1 if anything is different.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import PIL.Image
import PIL.ImageOps
from numpy.typing import NDArray

import edgespec
from edgespec import Image, Reply, Runtime
from edgespec.backends.llamacpp.native import mtmd
from edgespec.chat.store import ChatStore
from edgespec.errors import AttachmentError, EdgespecError
from scripts.compare_images import (
    CONTEXT_TOKENS,
    MAX_TOKENS,
    METHODS,
    answer_of,
    edgespec_reply,
    load_options,
    run_llama_server,
    server_answer,
    table_line,
    token_ids,
    write_models,
)
from scripts.peers.llama_server import LlamaServer, binary_version

_ORIENTATION = 0x0112
# The server's APIs, each with the heading of its column.
_APIS = {
    "/v1/chat/completions": "openai",
    "/v1/responses": "responses",
    "/v1/messages": "anthropic",
    "/api/chat": "ollama",
}
_COLUMNS = {"python": "python", "generate": "generate", "chat": "chat", **_APIS}


class _File(NamedTuple):
    """A file, and the text that is sent with it. The text names the file, as in the chat."""

    path: Path
    data: bytes

    @property
    def text(self) -> str:
        return f"@{self.path.name} the file list"


class _Expected(NamedTuple):
    """What edgespec is expected to answer: the text of a reply, or the end of the message of an error."""

    text: str = ""
    error: str = ""

    def result(self, text: str | None, error: str | None) -> str:
        """Return the result to print for the text of a reply or the message of an error."""
        if self.error:
            return "rejected" if text is None and error and self.error in error else "DIFFERENT"
        # The chat removes white space around replies.
        return "equal" if text is not None and text.strip() == self.text.strip() else "DIFFERENT"


@dataclass(frozen=True)
class _Comparison:
    """The files that one model gets, and how the programs answered.

    Attributes:
        target: The model. Its projector is found in its folder.
        threads: Number of threads.
        files: The files.
        expected: What edgespec is expected to answer to each file.
        results: The results to print for each file, by column.
    """

    target: Path
    threads: int
    files: Sequence[_File]
    expected: dict[Path, _Expected] = field(default_factory=dict)
    results: dict[Path, dict[str, str]] = field(default_factory=dict)

    def add(self, file: _File, column: str, text: str | None, error: str | None) -> None:
        """Add the result for the text of a reply or the message of an error."""
        self.results[file.path][column] = self.expected[file.path].result(text, error)


def main() -> None:
    """Compare the programs on all models and files, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-server", type=Path, required=True, help="see scripts/build_llama_server")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", default="", help="kinds of models, separated by commas (default: all)")
    parser.add_argument("--files", default="", help="names of files, without their endings (default: all)")
    args = parser.parse_args()
    print(f"llama-server: {binary_version(args.llama_server)}\n")
    print(table_line("model", *_COLUMNS.values(), "file"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names, kinds = ([*filter(None, each.split(","))] for each in (args.files, args.kinds))
        files = [file for file in _write_files(folder / "files") if not names or file.path.stem in names]
        equal = [
            _compare(kind, _Comparison(target, args.threads, files), projector, args.llama_server)
            for kind, (target, projector) in write_models(folder).items()
            if not kinds or kind in kinds
        ]
    sys.exit(not all(equal))


def _write_files(folder: Path) -> list[_File]:
    from tests.attachments.hostile_images import HOSTILE

    folder.mkdir()
    files = []
    for name, hostile in HOSTILE.items():
        path = folder / f"{name.replace(' ', '-')}{Path(hostile.name).suffix}"
        path.write_bytes(hostile.write())
        files.append(_File(path, path.read_bytes()))
    return files


def _compare(kind: str, comparison: _Comparison, projector: Path, binary: Path) -> bool:
    """Print a line for each file, and return whether nothing is different."""
    target, threads = comparison.target, comparison.threads
    with (
        edgespec.load(target, mmproj=projector, **load_options(threads)) as runtime,
        run_llama_server(binary, target, projector, threads) as server,
    ):
        for file in comparison.files:
            comparison.expected[file.path], python = _python_result(runtime, server, file)
            comparison.results[file.path] = {"python": python}
    _add_api_results(comparison)
    _add_chat_results(comparison)
    for file in comparison.files:
        comparison.add(file, "generate", *_generate(comparison, file))
        row = [comparison.results[file.path][column] for column in _COLUMNS]
        print(table_line(kind, *row, file.path.name), flush=True)
    return not any("DIFFERENT" in row.values() for row in comparison.results.values())


def _python_result(runtime: Runtime, server: LlamaServer, file: _File) -> tuple[_Expected, str]:
    """Return what the other interfaces should answer, and the result of the Python API."""
    try:
        image = Image.read(file.data, file.path.name)
    except AttachmentError as error:
        return _Expected(error=error.what.removeprefix(file.path.name)), "rejected"
    chat: list[list[str | bytes]] = [[file.data, file.text]]
    try:
        replies: list[Reply] = [edgespec_reply(runtime, chat, method) for method in METHODS]
    except EdgespecError as error:
        # The image has more tokens than the context, which every interface says in its own words.
        return _Expected(error=error.what.partition(" tokens, ")[2] or error.what), "rejected"
    expected = token_ids(server_answer(server, [[_for_llama_server(image), file.text]]))
    same = all(token_ids(answer_of(reply)) == expected for reply in replies)
    return _Expected(replies[0].text), "equal" if same else "DIFFERENT"


def _for_llama_server(image: Image) -> bytes:
    """Return the file, or an upright PNG file with its pixels if llama-server would not show it upright."""
    if image.format == "WebP":
        picture = PIL.Image.open(BytesIO(image.data)).convert("RGB")
    elif image.orientation == 1:
        return image.data
    else:
        # Decode the file as llama-server does, because decoders of JPEG files round differently.
        picture = PIL.Image.fromarray(_decoded_by_libmtmd(image.data))
        picture.getexif()[_ORIENTATION] = image.orientation
        picture = PIL.ImageOps.exif_transpose(picture)
    encoded = BytesIO()
    picture.save(encoded, "PNG")
    return encoded.getvalue()


def _decoded_by_libmtmd(data: bytes) -> NDArray[np.uint8]:
    """Return the stored pixels of a file, [height, width, 3]."""
    lib = mtmd()
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    bitmap = lib.mtmd_helper_bitmap_init_from_buf(None, buffer, len(data), False)
    shape = lib.mtmd_bitmap_get_ny(bitmap), lib.mtmd_bitmap_get_nx(bitmap), 3
    pixels = np.ctypeslib.as_array(lib.mtmd_bitmap_get_data(bitmap), (int(np.prod(shape)),)).copy()
    lib.mtmd_bitmap_free(bitmap)
    return pixels.reshape(shape)


def _add_api_results(comparison: _Comparison) -> None:
    from tests.server.conftest import running

    options = load_options(comparison.threads)
    draft = options.pop("draft")
    with (
        running(target=str(comparison.target), draft=draft, load_options=options) as server,
        httpx2.Client(base_url=server.url, timeout=120, trust_env=False) as client,
    ):
        for file in comparison.files:
            for api in _APIS:
                response = client.post(api, json=_body(api, file))
                comparison.add(file, api, *_api_answer(response.status_code, response.json()))


def _body(api: str, file: _File) -> dict[str, Any]:
    """Return the body of a request with the file before its text."""
    encoded = base64.b64encode(file.data).decode()
    # The server ignores the type, because clients often derive it from the name of a file.
    url = f"data:image/png;base64,{encoded}"
    text: dict[str, Any] = {"type": "text", "text": file.text}
    if api == "/api/chat":
        messages: list[dict[str, Any]] = [{"role": "user", "content": file.text, "images": [encoded]}]
        return {
            "messages": messages,
            "stream": False,
            "options": {"temperature": 0, "num_predict": MAX_TOKENS},
        }
    if api == "/v1/responses":
        content = [
            {"type": "input_image", "image_url": url},
            {"type": "input_text", "text": file.text},
        ]
        return {
            "input": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_output_tokens": MAX_TOKENS,
        }
    if api == "/v1/messages":
        source = {"type": "base64", "media_type": "image/png", "data": encoded}
        image: dict[str, Any] = {"type": "image", "source": source}
    else:
        image = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [image, text]}]
    return {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}


def _api_answer(status: int, answer: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the text of a reply, or the message of an error."""
    if status == 200:
        return _reply_text(answer), None
    error = answer["error"]
    return None, error if isinstance(error, str) else error["message"]


def _reply_text(answer: Mapping[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))
    if "content" in answer:
        return "".join(block["text"] for block in answer["content"])
    return str(answer["message"]["content"])


def _add_chat_results(comparison: _Comparison) -> None:
    """Send each file in a new chat, and read the replies from the saved chats."""
    with tempfile.TemporaryDirectory() as data:
        lines = "".join(f"{file.text}\n/new\n" for file in comparison.files)
        completed = _edgespec(["chat", "--plain"], comparison, lines, data)
        store = ChatStore(Path(data) / "chats")
        replies: dict[str, str | None] = {}
        for stored in store.list():
            first, *others = store.load(stored.id).messages
            replies[first.content] = others[0].content if others else None
    for file in comparison.files:
        problems = [line for line in completed.stderr.splitlines() if file.path.name in line]
        error = problems[0] if len(problems) == 1 else None
        comparison.add(file, "chat", replies.get(file.text), error)


def _generate(comparison: _Comparison, file: _File) -> tuple[str | None, str | None]:
    """Return the reply of `edgespec generate`, or the message of its only error."""
    command = ["generate", "--json", "--image", file.path.name, file.text]
    completed = _edgespec(command, comparison)
    answer = json.loads(completed.stdout)
    if completed.returncode == 0:
        return answer["text"], None
    is_clear = completed.returncode == 1 and "Traceback" not in completed.stderr
    return None, answer["error"]["message"] if is_clear else None


def _edgespec(
    command: list[str], comparison: _Comparison, text: str = "", data: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run edgespec in the folder of the files."""
    options = ["--target", comparison.target, "--draft", "none", "--temperature", 0]
    options += ["--max-tokens", MAX_TOKENS, "--context", CONTEXT_TOKENS]
    options += ["--threads", comparison.threads, "--gpu-layers", 0]
    environment = {**os.environ, "EDGESPEC_MEASURE_COSTS": "false"}
    if data:
        environment["EDGESPEC_DATA_DIR"] = data
    return subprocess.run(
        [sys.executable, "-m", "edgespec", *command, *map(str, options)],
        input=text,
        cwd=comparison.files[0].path.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    try:
        main()
    except EdgespecError as error:
        sys.exit(f"error: {error}")
