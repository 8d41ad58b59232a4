"""Images in prompts of GGUF models, on random models of the common kinds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends.llamacpp.model import load, load_slots
from edgespec.backends.llamacpp.native import library, mtmd
from edgespec.backends.replay import ReplayModel
from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError, EdgespecError, ModelFileError
from edgespec.model.base import LanguageModel, LoadOptions
from edgespec.model.image import Image
from edgespec.model.image_tokens import contains_image
from tests.backends.tiny_models import write_lfm2
from tests.backends.tiny_vision import KINDS, VisionKind, VisionModel, picture, png_bytes, write_vision_model
from tests.raising import raises

BEFORE, AFTER = "the file list ", " of the list"
STEPS = 16


@pytest.fixture(scope="module", params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    kind: VisionKind = request.param
    return write_vision_model(tmp_path_factory.mktemp(kind), kind)


def options(files: VisionModel, **more: Any) -> LoadOptions:
    values: dict[str, Any] = {"context_tokens": 512, "gpu_layers": 0, "threads": 1, "kv_type": "f16"} | more
    return LoadOptions(projector=str(files.projector), **values)


@pytest.fixture
def model(files: VisionModel) -> Iterator[LanguageModel]:
    model = load(str(files.model), "tiny", options(files))
    yield model
    model.close()


@pytest.fixture
def image() -> Image:
    return Image.read(png_bytes(picture()), "a.png")


def prompt(model: LanguageModel, *images: Image) -> tuple[list[int], Any]:
    """Return a prompt with images between pieces of text, and the objects that keep the images usable."""
    prepared = [model.prepare_image(each) for each in images]
    tokens = model.vocabulary.tokenize(BEFORE, special=True, start=True)
    for each in prepared:
        tokens += [*each.tokens, *model.vocabulary.tokenize(AFTER, special=True, start=False)]
    return tokens, prepared


def last_logits(model: LanguageModel, tokens: Sequence[int]) -> Logits:
    """Prefill a prompt, and return the logits after its last token."""
    return model.prefill_prompt(tokens) or model.verify(TokenTree.chain(tokens[-1]))


def greedy(model: LanguageModel, tokens: Sequence[int]) -> list[int]:
    logits, reply = last_logits(model, tokens), []
    for _ in range(STEPS):
        reply.append(logits.best(0, 1)[0][0])
        model.commit(())
        logits = model.verify(TokenTree.chain(reply[-1]))
    model.truncate(model.length)
    return reply


def reference(model: Any, image: Image) -> list[int]:
    """Return the reply that libmtmd's own helper gives, which llama.cpp's programs use."""
    lib, vision, encoder = library(), mtmd(), model.encoder
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    context = lib.llama_init_from_model(model.weights[0], params)
    chunks, bitmap = vision.mtmd_input_chunks_init(), encoder._bitmap(image)
    try:
        text = f"{BEFORE}<__media__>{AFTER}".encode()
        given = vision.mtmd_input_text(text, len(text), True, True)
        bitmaps = (ctypes.c_void_p * 1)(bitmap)
        assert not vision.mtmd_tokenize(encoder._context, chunks, ctypes.byref(given), bitmaps, 1)
        end = lib.llama_pos(0)
        status = vision.mtmd_helper_eval_chunks(
            encoder._context, context, chunks, 0, 0, 512, True, ctypes.byref(end)
        )
        assert not status
        reply: list[int] = []
        for _ in range(STEPS):
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (model.facts.vocab_size,))
            reply.append(int(logits.argmax()))
            token = (lib.llama_token * 1)(reply[-1])
            assert not lib.llama_decode(context, lib.llama_batch_get_one(token, 1))
        return reply
    finally:
        vision.mtmd_bitmap_free(bitmap)
        vision.mtmd_input_chunks_free(chunks)
        lib.llama_free(context)


def test_replies_equal_those_of_llama_cpp(model: LanguageModel, image: Image) -> None:
    tokens, _kept = prompt(model, image)
    assert greedy(model, tokens) == reference(model, image)


def test_other_images_get_other_replies_and_other_tokens(model: LanguageModel, image: Image) -> None:
    other = Image.read(png_bytes(picture(seed=1)), "b.png")
    (one, _kept), (two, _also) = prompt(model, image), prompt(model, other)
    first = last_logits(model, one).at(0, np.arange(model.facts.vocab_size))
    model.truncate(0)
    second = last_logits(model, two).at(0, np.arange(model.facts.vocab_size))
    assert set(filter(lambda token: contains_image([token]), one)).isdisjoint(two)
    assert np.abs(first - second).max() > 0.01


def test_the_same_image_has_the_same_tokens_again(model: LanguageModel, image: Image) -> None:
    again = Image.read(bytes(image.data), "renamed.png")
    assert model.prepare_image(image).tokens == model.prepare_image(again).tokens


def test_a_wide_pass_equals_single_steps_after_images(model: LanguageModel, image: Image) -> None:
    tokens, _kept = prompt(model, image, image)
    reply = greedy(model, tokens)
    model.truncate(0)
    last_logits(model, tokens)
    model.commit(())
    logits = model.verify(TokenTree.chain(reply[0], reply[1:4]))
    assert [logits.best(row, 1)[0][0] for row in range(4)] == reply[1:5]
    # Roll back to the middle of the draft, and go on.
    model.commit((1,))
    logits = model.verify(TokenTree.chain(reply[2]))
    assert logits.best(0, 1)[0][0] == reply[3]


def test_branches_after_an_image_can_be_kept(model: LanguageModel, image: Image) -> None:
    if not model.facts.capabilities.tree:
        pytest.skip("the model verifies no trees")
    tokens, _kept = prompt(model, image)
    reply = greedy(model, tokens)
    model.truncate(0)
    last_logits(model, tokens)
    model.commit(())
    wrong = (reply[1] + 1) % 200
    tree = TokenTree((reply[0], wrong, reply[1]), (-1, 0, 0), (None,) * 3)
    logits = model.verify(tree)
    assert logits.best(2, 1)[0][0] == reply[2]
    model.commit((2,))
    assert model.verify(TokenTree.chain(reply[2])).best(0, 1)[0][0] == reply[3]


def test_a_rollback_before_an_image_leaves_no_trace(model: LanguageModel, image: Image) -> None:
    tokens, _kept = prompt(model, image)
    expected = greedy(model, tokens)
    text = len(model.vocabulary.tokenize(BEFORE, special=True, start=True))
    model.truncate(text)
    more = tokens[text:]
    logits, reply = model.prefill_prompt(more) or model.verify(TokenTree.chain(more[-1])), []
    for _ in range(4):
        reply.append(logits.best(0, 1)[0][0])
        model.commit(())
        logits = model.verify(TokenTree.chain(reply[-1]))
    assert reply == expected[:4]


def test_a_restored_state_with_an_image_goes_on_the_same(
    files: VisionModel, model: LanguageModel, image: Image
) -> None:
    tokens, _kept = prompt(model, image)
    expected = greedy(model, tokens)
    model.truncate(len(tokens) - 1)
    snapshot = model.snapshot()
    other = load(str(files.model), "tiny", options(files))
    try:
        other.restore(snapshot)
        assert other.length == len(tokens) - 1
        logits = other.verify(TokenTree.chain(tokens[-1]))
        reply = []
        for _ in range(STEPS):
            reply.append(logits.best(0, 1)[0][0])
            other.commit(())
            logits = other.verify(TokenTree.chain(reply[-1]))
        assert reply == expected
    finally:
        other.close()


def test_a_context_with_an_image_can_grow(files: VisionModel, image: Image) -> None:
    model = load(str(files.model), "tiny", options(files, initial_context_tokens=256))
    try:
        tokens, _kept = prompt(model, image)
        expected = greedy(model, tokens)
        model.truncate(len(tokens) - 1)
        model.resize(512)
        logits = model.verify(TokenTree.chain(tokens[-1]))
        assert logits.best(0, 1)[0][0] == expected[0]
    finally:
        model.close()


def test_an_image_that_no_prompt_keeps_is_reported(model: LanguageModel, image: Image) -> None:
    tokens, kept = prompt(model, image)
    del kept
    with raises(BackendError):
        model.prefill(tokens)
    assert model.length < len(tokens)


def test_concurrent_replies_see_images(files: VisionModel, model: LanguageModel, image: Image) -> None:
    slots = load_slots(str(files.model), "tiny", options(files, parallel=2))
    try:
        prompts = [prompt(slot, image) for slot in slots]
        expected, _kept = prompt(model, image)
        alone = greedy(model, expected)
        with ThreadPoolExecutor(2) as pool:
            replies = pool.map(greedy, slots, [tokens for tokens, _kept in prompts])
            assert list(replies) == [alone, alone]
        # The positions of tokens after an image depend on the image, even after a rollback and in a copied
        # cache.
        slot, tokens = slots[1], prompts[1][0]
        for base in (slot, slots[0]):
            if base is not slot:
                base.truncate(0)
                base.restore(slot.snapshot(0, len(tokens) - 1))
            base.truncate(len(tokens) - 1)
            logits = base.verify(TokenTree.chain(tokens[-1]))
            assert logits.best(0, 1)[0][0] == alone[0]
            base.commit(())
    finally:
        for slot in slots:
            slot.close()


def test_a_model_without_a_projector_refuses_images(files: VisionModel, image: Image) -> None:
    model = load(str(files.model), "tiny", LoadOptions(context_tokens=256, gpu_layers=0))
    try:
        assert not model.facts.sees_images
        with raises(CapabilityError, "tiny", code="images_not_supported"):
            model.prepare_image(image)
    finally:
        model.close()


@pytest.mark.long
@pytest.mark.parametrize("size", [(1, 1), (3, 900), (900, 3), (1500, 1100)])
def test_images_of_any_shape_are_accepted(model: LanguageModel, size: tuple[int, int]) -> None:
    image = Image.read(png_bytes(picture(*size)), "a.png")
    try:
        tokens, _kept = prompt(model, image)
    except EdgespecError:
        # Qwen-VL refuses images that are 200 times as wide as high.
        assert max(size) > 200 * min(size)
        return
    assert contains_image(tokens)


def test_a_projector_of_another_model_is_refused(files: VisionModel, tmp_path: Path) -> None:
    damaged = tmp_path / "mmproj.gguf"
    damaged.write_bytes(files.projector.read_bytes()[:-1000])
    with raises(ModelFileError, str(damaged)):
        load(str(files.model), "tiny", LoadOptions(context_tokens=256, gpu_layers=0, projector=str(damaged)))


def test_recurrent_models_see_images(tmp_path: Path, image: Image) -> None:
    projector = write_vision_model(tmp_path, "llava").projector
    path = write_lfm2(tmp_path / "recurrent.gguf")
    model = load(str(path), "recurrent", options(VisionModel(path, projector)))
    try:
        assert isinstance(model, ReplayModel)
        tokens, _kept = prompt(model, image, image)
        reply = greedy(model, tokens)
        assert len(set(reply)) > 1
        model.truncate(0)
        last_logits(model, tokens)
        model.commit(())
        # Reject the last two of four drafted tokens.
        wrong = [reply[1], reply[2], 7 if reply[3] != 7 else 8, 9]
        logits = model.verify(TokenTree.chain(reply[0], wrong))
        assert [logits.best(row, 1)[0][0] for row in range(3)] == reply[1:4]
        model.commit((1, 2))
        assert model.verify(TokenTree.chain(reply[3])).best(0, 1)[0][0] == reply[4]
        # Roll back to before the images, and read them again.
        model.truncate(3)
        assert greedy(model, tokens[model.length :]) == reply
    finally:
        model.close()
