"""Replies to prompts with images: the same with every drafter and with every cached prefix."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import Image, Message, PlacedImage, Runtime
from edgespec.errors import AttachmentError, CapabilityError, OptionError
from tests.backends.tiny_heads import write_eagle
from tests.backends.tiny_models import write_llama
from tests.backends.tiny_vision import KINDS, VisionKind, VisionModel, picture, png_bytes, write_vision_model
from tests.raising import raises

QUESTION = "the file list of the file list of the file"
METHODS = ("ngram", "suffix", "lookahead", "model", "model+suffix")


def load(files: VisionModel, **options: Any) -> Runtime:
    values: dict[str, Any] = {"draft": "none", "method": "none", "gpu_layers": 0, "threads": 1}
    values |= {"memory": "2GiB", "context": 1024, "exactness": "bits", "measure_costs": False, "trust": True}
    return edgespec.load(files.model, **(values | options))


@pytest.fixture(
    scope="module",
    params=[kind if kind == "qwen2.5vl" else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS],
)
def kind(request: pytest.FixtureRequest) -> VisionKind:
    found: VisionKind = request.param
    return found


@pytest.fixture(scope="module")
def files(kind: VisionKind, tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return write_vision_model(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def runtime(files: VisionModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    draft = write_llama(tmp_path_factory.mktemp("draft") / "draft.gguf", seed=5)
    with load(files, draft=str(draft), methods=METHODS) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def photo() -> bytes:
    return png_bytes(picture())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafting_does_not_change_replies(runtime: Runtime, photo: bytes, temperature: float) -> None:
    def reply(method: str) -> edgespec.Reply:
        runtime.clear_cache()
        return runtime.generate(
            QUESTION, images=[photo], max_tokens=24, temperature=temperature, seed=1, method=method
        )

    plain = reply("none")
    replies = {method: reply(method) for method in METHODS}
    assert {method: each.tokens for method, each in replies.items()} == dict.fromkeys(METHODS, plain.tokens)
    assert replies["model"].stats.drafted_tokens > 0
    assert max(each.stats.accepted_tokens for each in replies.values()) > 0


def test_a_cached_image_is_reused_and_changes_nothing(runtime: Runtime, photo: bytes) -> None:
    options: Any = {"max_tokens": 12, "temperature": 0, "images": [photo]}
    runtime.clear_cache()
    fresh = runtime.generate(QUESTION, **options)
    again = runtime.generate(QUESTION, **options)
    assert fresh.stats.cached_prompt_tokens == 0
    assert again.stats.cached_prompt_tokens > runtime.image_tokens(Image.read(photo))
    assert again.tokens == fresh.tokens
    other = runtime.generate(QUESTION, **(options | {"images": [png_bytes(picture(seed=3))]}))
    assert other.stats.cached_prompt_tokens < runtime.image_tokens(Image.read(photo)) + 10
    assert runtime.generate(QUESTION, **options).tokens == fresh.tokens


def test_a_conversation_keeps_its_image(runtime: Runtime, photo: bytes) -> None:
    runtime.clear_cache()
    chat = runtime.chat()
    chat.ask("the file", images=[photo], max_tokens=6, temperature=0, method="suffix")
    second = chat.ask("the list", max_tokens=6, temperature=0, method="suffix")
    assert second.stats.cached_prompt_tokens > runtime.image_tokens(Image.read(photo))
    runtime.clear_cache()
    fresh = runtime.reply([*chat.messages[:-1]], max_tokens=6, temperature=0)
    assert fresh.tokens == second.tokens


@pytest.mark.long
def test_a_stored_prefix_with_an_image_equals_a_fresh_one(files: VisionModel, photo: bytes) -> None:
    with load(files) as runtime:
        options: Any = {"max_tokens": 8, "temperature": 0}
        long = " ".join(["the file list of"] * 40)
        first = runtime.generate(long, images=[photo], **options)
        # Another prompt moves the first one to the prefix cache.
        runtime._session.prefix_cache.reuse_costs.prefill_seconds = 1.0  # type: ignore[union-attr]
        runtime.generate("of the file", **options)
        again = runtime.generate(long, images=[photo], **options)
        assert again.stats.cached_prompt_tokens > 100
        assert again.tokens == first.tokens


def test_images_stand_where_the_message_places_them(runtime: Runtime, photo: bytes) -> None:
    image, text = Image.read(photo), "the file list"

    def text_before_image(at: int) -> str:
        message = Message("user", text, images=(PlacedImage(image, at),))
        stream = runtime.stream_messages([message], max_tokens=1)
        stream.wait()
        before = takewhile(lambda token: token < runtime.target.vocab_size, stream._request.tokens)
        return b"".join(map(runtime.vocabulary.piece, before)).decode()

    texts = [text_before_image(at) for at in (0, 8, len(text))]
    assert [" ".join(each.split()) for each in texts] == ["user", "user the file", "user the file list"]


def test_penalties_and_constraints_ignore_images(runtime: Runtime, photo: bytes) -> None:
    penalised = runtime.generate(
        QUESTION, images=[photo], max_tokens=8, repetition_penalty=1.3, temperature=0.5, seed=2
    )
    assert penalised.tokens
    reply = runtime.generate(QUESTION, images=[photo], choice=["the", "list"], temperature=0, max_tokens=20)
    assert reply.answer in ("the", "list")


def test_old_images_leave_a_full_context_with_their_messages(runtime: Runtime, photo: bytes) -> None:
    image = Image.read(photo)
    turn = [Message("user", "the file " * 30, images=(PlacedImage(image),)), Message("assistant", "of")]
    messages = [*turn * 30, Message("user", "the list")]
    stream = runtime.stream_messages(messages, max_tokens=3, temperature=0)
    stream.wait()
    assert stream.dropped_messages > 0


def test_a_prompt_can_have_many_images(runtime: Runtime) -> None:
    images = [png_bytes(picture(28, 28, seed=seed)) for seed in range(20)]
    reply = runtime.generate(QUESTION, images=images, max_tokens=2, temperature=0)
    assert reply.stats.prompt_tokens > sum(runtime.image_tokens(Image.read(each)) for each in images)


def test_a_prompt_must_not_end_with_an_image(runtime: Runtime, kind: VisionKind, photo: bytes) -> None:
    if kind != "llava":
        pytest.skip("a control token follows the images of this model")
    with raises(OptionError, code="prompt_empty"):
        runtime.generate("", images=[photo], raw=True)


def test_image_tokens_alone_are_no_prompt(runtime: Runtime, photo: bytes) -> None:
    tokens = runtime._session.target.prepare_image(Image.read(photo)).tokens
    with raises(OptionError, code="token_unknown"):
        runtime.stream_tokens([*tokens, 5])


def test_log_probabilities_of_images_are_refused(runtime: Runtime, photo: bytes) -> None:
    with raises(OptionError, code="option_conflict"):
        runtime.generate(QUESTION, images=[photo], prompt_logprobs=1)


def test_the_projector_is_in_the_plan(files: VisionModel, runtime: Runtime) -> None:
    assert runtime.plan
    items = {item.kind: item.bytes for item in runtime.plan.items if item.role == "projector"}
    assert items["weights"] == pytest.approx(files.projector.stat().st_size, rel=0.05)
    assert items["compute"] > 0
    assert runtime.target.sees_images


def test_without_its_projector_a_model_refuses_images(files: VisionModel, photo: bytes) -> None:
    with load(files, mmproj="none") as runtime:
        assert runtime.plan
        assert not any(item.role == "projector" for item in runtime.plan.items)
        with raises(CapabilityError, code="images_not_supported"):
            runtime.generate(QUESTION, images=[photo])


def test_a_missing_image_is_reported(runtime: Runtime, tmp_path: Path) -> None:
    with raises(AttachmentError, "no.png", code="attachment_unreadable"):
        runtime.generate(QUESTION, images=[tmp_path / "no.png"])


def test_a_projector_is_dropped_before_anything_else_shrinks(files: VisionModel) -> None:
    options: Any = {"draft": "none", "method": "none", "gpu_layers": 0, "context": 512, "mmproj": "auto"}

    def needs(**more: Any) -> int:
        items = edgespec.plan(files.model, **(options | more)).plan.items
        return sum(item.bytes for item in items)

    room = needs(mmproj="none") + (16 << 20)
    tight = edgespec.plan(files.model, **options, memory=room)
    assert tight.plan.fits
    assert not tight.plan.decisions
    assert not any(item.role == "projector" for item in tight.plan.items)
    named = edgespec.plan(files.model, **options | {"mmproj": files.projector}, memory=room)
    assert any(item.role == "projector" for item in named.plan.items)


@pytest.mark.long
def test_images_are_reduced_before_they_are_turned_off(tmp_path: Path) -> None:
    files = write_vision_model(tmp_path, "qwen2.5vl")
    options: Any = {"draft": "none", "method": "none", "gpu_layers": 0, "context": 512, "threads": 1}
    ample, tight = (edgespec.plan(files.model, **options, memory=each).plan for each in ("4GiB", "1GiB"))

    def projector_bytes(plan: edgespec.MemoryPlan) -> int:
        return sum(item.bytes for item in plan.items if item.role == "projector")

    assert projector_bytes(ample) > 2 << 30
    assert 0 < projector_bytes(tight) < 1 << 28
    assert tight.fits
    assert not tight.decisions
    photo = png_bytes(picture(1600, 1200))
    with edgespec.load(files.model, **options, memory="1GiB") as runtime:
        reduced = runtime.image_tokens(edgespec.Image.read(photo))
        assert "reduced" in runtime.target.notice
    with edgespec.load(files.model, **options, memory="4GiB") as runtime:
        assert runtime.image_tokens(edgespec.Image.read(photo)) > reduced


def test_heads_do_not_draft_with_images(tmp_path: Path, photo: bytes) -> None:
    files = write_vision_model(tmp_path, "llava", layers=3)
    head = write_eagle(tmp_path / "eagle3-tiny.gguf", layers=(0, 1, 2))
    options: Any = {"max_tokens": 12, "temperature": 0}
    with load(files) as runtime:
        seen = runtime.generate(QUESTION, images=[photo], **options)
        read = runtime.generate(QUESTION, **options)
    with load(files, head=str(head), method="eagle", methods=["eagle+suffix"]) as runtime:
        for _ in range(2):
            reply = runtime.generate(QUESTION, images=[photo], **options)
            assert (reply.tokens, reply.method.effective) == (seen.tokens, "none")
            assert "eagle" in reply.method.reason
            reply = runtime.generate(QUESTION, images=[photo], method="eagle+suffix", **options)
            assert (reply.tokens, reply.method.effective) == (seen.tokens, "suffix")
            reply = runtime.generate(QUESTION, **options)
            assert (reply.tokens, reply.method.effective) == (read.tokens, "eagle")
            assert reply.stats.drafted_tokens > 0
