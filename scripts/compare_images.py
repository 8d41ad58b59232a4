#!/usr/bin/env python3
"""Compare replies to images with those of llama-server, on the same files at temperature 0.

    scripts/build_llama_server ../llama
    scripts/compare_images.py --llama-server ../llama/llama-server
    scripts/compare_images.py --llama-server ../llama/llama-server --target gemma.gguf --mmproj mmproj.gguf

Without --target, it compares small random models: CLIP with an MLP (LLaVA), Gemma 3 and Qwen2.5-VL. Both
programs get the same messages, with images before, between and after the text, and use the chat template in
the model's file. For each method, the table says whether edgespec's reply has the same tokens as
llama-server's.

drafted, accepted   tokens that all methods together drafted, and those of them in the replies
difference          largest difference between the log-probabilities that both programs report for a token, at
                    the positions up to the first different token

Exits with status 1 if a reply differs, or if a method that always drafts drafted nothing for a model.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import edgespec
from edgespec import Image, Message, PlacedImage, Reply, Runtime
from edgespec.errors import EdgespecError
from scripts.peers.llama_server import LlamaServer, binary_version

# These methods draft even if that takes time.
DRAFTING = ("suffix", "lookahead")
# `none` is plain decoding, and `auto` is the default.
METHODS = ("none", "auto", *DRAFTING)
MAX_TOKENS = 32
CONTEXT_TOKENS = 1024
TOP_LOGPROBS = 5

# The messages of a chat, each with its texts and encoded images. The first message is the user's.
Chat: TypeAlias = Sequence[Sequence[str | bytes]]
# The tokens of a reply, each with the log-probabilities of the most likely tokens at its position.
Answer: TypeAlias = list[tuple[int, dict[int, float]]]


def main() -> None:
    """Compare the programs on all models and chats, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-server", type=Path, required=True, help="see scripts/build_llama_server")
    parser.add_argument("--target", type=Path, help="a GGUF model that sees images")
    parser.add_argument("--mmproj", type=Path, help="the projector of the model")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if (args.target is None) != (args.mmproj is None):
        parser.error("--target and --mmproj must be given together")
    print(f"llama-server: {binary_version(args.llama_server)}\n")
    print(table_line("model", "chat", *METHODS, "drafted", "accepted", "difference"))
    with tempfile.TemporaryDirectory() as folder:
        models = {args.target.name: (args.target, args.mmproj)} if args.target else write_models(Path(folder))
        equal = [
            _compare(name, target, projector, args.llama_server, args.threads)
            for name, (target, projector) in models.items()
        ]
    sys.exit(not all(equal))


def write_models(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Write a small random model of each kind, and return its file and its projector."""
    from tests.backends.tiny_vision import KINDS, write_vision_model

    return {kind: write_vision_model(folder / kind, kind) for kind in KINDS}


def _chats() -> dict[str, Chat]:
    from tests.backends.tiny_vision import jpeg_bytes, picture, png_bytes

    png, jpeg = png_bytes(picture()), jpeg_bytes(picture(150, 200, seed=1))
    return {
        "first": [[png, "What is in this picture?"]],
        "last": [["the file list of the file list of the file", jpeg]],
        "two": [[png, "the list", jpeg, "of the file"]],
        "later": [["the file list"], ["the list of the file"], [jpeg, "the file list of the file"]],
    }


def table_line(*cells: object) -> str:
    """Return a line of the table."""
    return "".join(f"{cell!s:<11}" for cell in cells)


def _compare(name: str, target: Path, projector: Path, binary: Path, threads: int) -> bool:
    """Print a line for each chat, and return whether all replies are equal and the methods drafted."""
    equal, drafting = [], set()
    with (
        edgespec.load(target, mmproj=projector, **load_options(threads)) as runtime,
        run_llama_server(binary, target, projector, threads) as server,
    ):
        for chat_name, chat in _chats().items():
            expected = server_answer(server, chat)
            replies = [edgespec_reply(runtime, chat, method) for method in METHODS]
            answers = [*map(answer_of, replies)]
            same = [token_ids(answer) == token_ids(expected) for answer in answers]
            drafted = sum(reply.stats.drafted_tokens for reply in replies)
            accepted = sum(reply.stats.accepted_tokens for reply in replies)
            difference = max(_difference(answer, expected) for answer in answers)
            results = ["equal" if each else "DIFFERENT" for each in same]
            print(table_line(name, chat_name, *results, drafted, accepted, f"{difference:.1e}"), flush=True)
            equal += same
            drafting |= {
                method for method, reply in zip(METHODS, replies, strict=True) if reply.stats.drafted_tokens
            }
    if idle := [method for method in DRAFTING if method not in drafting]:
        print(f"{name}: {' and '.join(idle)} drafted no tokens")
    # lookahead drafts only if wide passes cost little, which depends on the machine.
    return all(equal) and not {*idle} - {"lookahead"}


def load_options(threads: int) -> dict[str, Any]:
    """Return the options of `load` for comparisons on the CPU."""
    return {
        "draft": "none",
        "methods": [*DRAFTING],
        "gpu_layers": 0,
        "context": CONTEXT_TOKENS,
        "threads": threads,
    }


@contextmanager
def run_llama_server(binary: Path, target: Path, projector: Path, threads: int) -> Iterator[LlamaServer]:
    """Run llama-server with the kernels that edgespec uses, one reply at a time, and without caches."""
    flags = [
        "--model",
        target,
        "--mmproj",
        projector,
        "--jinja",
        "--offline",
        "--gpu-layers",
        0,
        "--no-repack",
    ]
    flags += ["--threads", threads, "--threads-batch", threads, "--batch-size", 512, "--ubatch-size", 512]
    flags += ["--ctx-size", CONTEXT_TOKENS, "--parallel", 1, "--cache-ram", 0, "--no-cache-prompt"]
    # The types that edgespec uses on CPUs.
    flags += ["--flash-attn", "on", "--cache-type-k", "f16", "--cache-type-v", "bf16"]
    server = LlamaServer(binary, [*map(str, flags)])
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _role(index: int) -> Literal["user", "assistant"]:
    return "assistant" if index % 2 else "user"


def server_answer(server: LlamaServer, chat: Chat) -> Answer:
    """Return the reply of llama-server. Raises EdgespecError if it rejects the request."""
    messages = [
        {"role": _role(index), "content": [*map(_content_part, parts)]} for index, parts in enumerate(chat)
    ]
    body = {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, "logprobs": True}
    # Only the verbose part of the response contains the tokens.
    body |= {"top_logprobs": TOP_LOGPROBS, "return_tokens": True, "verbose": True}
    response = server.request("/v1/chat/completions", body)
    logprobs = response["choices"][0]["logprobs"]["content"][::-1]
    answer: Answer = []
    for token in response["__verbose"]["tokens"]:
        # llama-server reports no log-probabilities of tokens that end within a character.
        reported = logprobs.pop()["top_logprobs"] if logprobs and logprobs[-1]["id"] == token else []
        answer.append((token, {each["id"]: each["logprob"] for each in reported}))
    return answer


def _content_part(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = "png" if b"PNG" in part[:8] else "jpeg"
    url = f"data:image/{kind};base64,{base64.b64encode(part).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def edgespec_reply(runtime: Runtime, chat: Chat, method: str) -> Reply:
    """Return edgespec's reply. The whole prompt is processed, because the prefix cache is disabled."""
    runtime.clear_cache()
    messages = []
    for index, parts in enumerate(chat):
        text, images = "", []
        for part in parts:
            if isinstance(part, str):
                text += part
            else:
                images.append(PlacedImage(Image.read(part), len(text)))
        messages.append(Message(_role(index), text, images=tuple(images)))
    return runtime.reply(messages, temperature=0, max_tokens=MAX_TOKENS, method=method, logprobs=TOP_LOGPROBS)


def answer_of(reply: Reply) -> Answer:
    """Return the tokens of a reply with their log-probabilities."""
    return [(each.token, {top.token: top.logprob for top in each.top}) for each in reply.logprobs]


def token_ids(answer: Answer) -> list[int]:
    """Return the tokens of an answer."""
    return [token for token, _ in answer]


def _difference(answer: Answer, expected: Answer) -> float:
    """Return the largest difference in log-probability at positions with equal prefixes."""
    largest = 0.0
    for (token, ours), (other, theirs) in zip(answer, expected, strict=False):
        largest = max([largest, *(abs(ours[each] - theirs[each]) for each in ours.keys() & theirs)])
        if token != other:
            break
    return largest


if __name__ == "__main__":
    try:
        main()
    except EdgespecError as error:
        sys.exit(f"error: {error}")
