"""Tests that MLX vocabularies equal llama.cpp's for the same model: bytes, control tokens and end tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.metadata import LlamaVocabulary
from edgespec.backends.llamacpp.native import library
from edgespec.backends.mlx.vocabulary import MlxVocabulary
from edgespec.errors import BackendError, ClosedError, EdgespecError
from edgespec.methods.model.translation import compare_vocabularies
from edgespec.model.base import LoadOptions, Vocabulary
from edgespec.store.catalogue import models_folder
from tests.backends.mlx.tiny_checkpoints import CHATML, ROWS, TOKENS, write_tokenizer
from tests.backends.tiny_models import WORDS, write_llama
from tests.raising import raises

_TYPES = {"control": gguf.TokenType.CONTROL, "user": gguf.TokenType.USER_DEFINED}

# Unusual text of chat templates, keyboards and faulty programs.
_TRICKY = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "_end|>", "</s>", "<s>", "<unk>", "<0x41>"),
    *(" ", "  ", "\n", "\r\n", "\t", "\x00", "\ufeff", "\u00a0", "\u2028", "▁", "Ġ", "\ud800", "\udfff"),
    *(
        "🙂",
        "👩\u200d👩\u200d👧",
        "é",
        "e\u0301",
        "ß",
        "日本",
        "٣",
        "'S",
        "it's",
        "1234",
        "the list of files",
    ),
)
TEXTS = st.lists(st.one_of(st.sampled_from(_TRICKY), st.text(max_size=6)), max_size=8).map("".join)
SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _of(folder: Path, vocab_size: int, ends: list[int] | None = None) -> MlxVocabulary:
    return MlxVocabulary(load_tokenizer(folder, eos_token_ids=ends), vocab_size)


def _write_gguf(path: Path, folder: Path, size: int, types: dict[str, str]) -> Path:
    """Write a byte-level tokenizer.json as GGUF metadata, as llama.cpp's converter does."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    texts = {token: text for text, token in tokenizer["model"]["vocab"].items()}
    texts |= {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(size)]
    normal = [gguf.TokenType.NORMAL if i in texts else gguf.TokenType.UNUSED for i in range(size)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [_TYPES[types[t]] if t in types else kind for t, kind in zip(tokens, normal, strict=True)]
    writer.add_token_types(kinds)
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _llama_vocabulary(path: Path) -> tuple[LlamaVocabulary, Any]:
    """Return llama.cpp's vocabulary from a file without weights, and the handle to free afterwards."""
    lib = library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    return LlamaVocabulary(model), model


def _assert_same_tokens(ours: Vocabulary, theirs: Vocabulary) -> None:
    assert ours.size == theirs.size
    for token in range(ours.size):
        assert ours.raw_piece(token) == theirs.raw_piece(token), token
        assert ours.piece(token) == theirs.piece(token), (token, ours.raw_piece(token))
        assert ours.is_end(token) == theirs.is_end(token), (token, ours.raw_piece(token))
    assert compare_vocabularies(ours, theirs, "mlx", "gguf").mapping == "same"
    assert compare_vocabularies(theirs, ours, "gguf", "mlx").mapping == "same"


def _assert_same_reading(ours: Vocabulary, theirs: Vocabulary, text: str) -> None:
    for special in (False, True):
        for start in (False, True):
            mine = ours.tokenize(text, special=special, start=start)
            assert max(ours.min_tokens(text), theirs.min_tokens(text)) <= len(mine)
            assert mine == theirs.tokenize(text, special=special, start=start), (special, start)


@pytest.fixture(scope="module")
def demo(demo_target: Path) -> Iterator[tuple[Vocabulary, Vocabulary]]:
    """Return the vocabulary of the bundled model on MLX and on llama.cpp."""
    folder = models_folder() / "demo-mlx"
    theirs = llamacpp.load(str(demo_target), "demo", LoadOptions(context_tokens=256))
    yield _of(folder, 8192, [1, 2]), theirs.vocabulary
    theirs.close()


def test_the_demo_has_the_same_tokens_on_both_backends(demo: tuple[Vocabulary, Vocabulary]) -> None:
    ours, theirs = demo
    _assert_same_tokens(ours, theirs)
    assert ours.chat_template == theirs.chat_template
    assert ours.eos_text == theirs.eos_text == "<|im_end|>"


@pytest.mark.long
@SETTINGS
@given(TEXTS)
@example("")
@example(" a")
@example("<|im_start|>user\nhi<|im_end|>\n")
def test_the_demo_tokenizes_the_same_on_both_backends(demo: tuple[Vocabulary, Vocabulary], text: str) -> None:
    _assert_same_reading(*demo, text)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vocabulary, Vocabulary]]:
    """Return a byte-level vocabulary with all kinds of added tokens and padding, on both backends."""
    folder = write_tokenizer(tmp_path_factory.mktemp("bpe"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Added tokens that are not marked as special, one of which looks like a control token, and gpt-oss's
    # markers.
    tokenizer.add_tokens([AddedToken("<|looks|>", normalized=False), AddedToken("<think>", normalized=False)])
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False)])
    tokenizer.add_special_tokens(["<|channel|>", "<|return|>", "<|call|>", "<|end|>", "<|fim_pad|>", "日"])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size() + 5
    control = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|looks|>",
        "<|return|>",
        "<|call|>",
        "<|end|>",
    ]
    types = dict.fromkeys([*control, "<|channel|>", "<|fim_pad|>", "日"], "control")
    path = _write_gguf(folder / "vocab.gguf", folder, size, {**types, "<think>": "user", "▁▁": "user"})
    theirs, model = _llama_vocabulary(path)
    yield _of(folder, size), theirs
    theirs.close(partial(library().llama_model_free, model))


def test_byte_level_tokens_are_the_same(byte_level: tuple[Vocabulary, Vocabulary]) -> None:
    ours, theirs = byte_level
    # The converter writes "▁" in such tokens as a space, but the test's writer does not, so skip that one.
    spaces = next(token for token in range(ours.size) if theirs.raw_piece(token) == "▁▁".encode())
    assert ours.raw_piece(spaces) == b"  "
    for token in range(ours.size):
        if token != spaces:
            assert ours.raw_piece(token) == theirs.raw_piece(token)
            assert ours.piece(token) == theirs.piece(token), ours.raw_piece(token)
            assert ours.is_end(token) == theirs.is_end(token), ours.raw_piece(token)
    assert [ours.raw_piece(token) for token in range(ours.size - 5, ours.size)] == [b""] * 5


@pytest.mark.long
@SETTINGS
@given(st.lists(st.one_of(TEXTS, st.sampled_from(["<|looks|>", "<think>", "<|channel|>", "<|end|>", "日"]))))
def test_byte_level_tokenizes_the_same(byte_level: tuple[Vocabulary, Vocabulary], parts: list[str]) -> None:
    _assert_same_reading(*byte_level, "".join(parts))


def _write_sentencepiece(folder: Path) -> Path:
    """Return the vocabulary of `write_llama` as a tokenizer.json, on both backends."""
    folder.mkdir()
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {text: i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vocabulary, Vocabulary]]:
    folder = tmp_path_factory.mktemp("spm")
    theirs, model = _llama_vocabulary(write_llama(folder / "tiny.gguf"))
    yield _of(_write_sentencepiece(folder / "hf"), theirs.size), theirs
    theirs.close(partial(library().llama_model_free, model))


def test_sentencepiece_tokens_are_the_same(sentencepiece: tuple[Vocabulary, Vocabulary]) -> None:
    ours, theirs = sentencepiece
    _assert_same_tokens(ours, theirs)
    assert (ours.bos_text, ours.eos_text) == (theirs.bos_text, theirs.eos_text) == ("<s>", "</s>")


@SETTINGS
@given(TEXTS)
def test_sentencepiece_tokenizes_the_same(sentencepiece: tuple[Vocabulary, Vocabulary], text: str) -> None:
    _assert_same_reading(*sentencepiece, text)


@pytest.fixture
def tiny(tmp_path: Path) -> MlxVocabulary:
    return _of(write_tokenizer(tmp_path), ROWS)


def test_control_tokens_are_plain_text_by_default(tiny: MlxVocabulary) -> None:
    (control,) = tiny.tokenize("<|im_start|>", special=True, start=False)
    assert tiny.piece(control) == b""
    assert tiny.raw_piece(control) == b"<|im_start|>"
    plain = tiny.tokenize("<|im_start|>", special=False, start=True)
    assert b"".join(tiny.piece(token) for token in plain) == b"<|im_start|>"
    assert control not in plain


@pytest.mark.long
@SETTINGS
@given(text=TEXTS)
def test_plain_text_round_trips(tiny: MlxVocabulary, text: str) -> None:
    tokens = tiny.tokenize(text, special=False, start=False)
    said = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    assert b"".join(tiny.piece(token) for token in tokens) == said


def test_a_token_beyond_the_logits_is_plain_text_or_an_error(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    without = _of(folder, TOKENS - 1)
    tokens = without.tokenize("a<|im_end|>", special=True, start=False)
    assert max(tokens) < TOKENS - 1
    assert b"".join(without.piece(token) for token in tokens) == b"a<|im_end|>"
    with raises(BackendError, "only 20", code="vocabulary_mismatch"):
        _of(folder, 20).tokenize("the list", special=False, start=False)


def test_unknown_token_ids_are_rejected(tiny: MlxVocabulary) -> None:
    for token in (-1, ROWS):
        with raises(BackendError, token, ROWS, code="token_unknown"):
            tiny.raw_piece(token)
        with raises(BackendError, code="token_unknown"):
            tiny.piece(token)


def _configured(folder: Path, **changes: Any) -> Path:
    write_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_end_tokens_come_from_all_configuration_files(tmp_path: Path) -> None:
    vocabulary = _of(write_tokenizer(tmp_path), ROWS, [65])
    ends = {token for token in range(ROWS) if vocabulary.is_end(token)}
    texts = {vocabulary.raw_piece(token) for token in ends}
    assert texts == {b"<|im_end|>", b"<|endoftext|>", vocabulary.raw_piece(65)}


def test_every_form_of_chat_template(tmp_path: Path) -> None:
    assert _of(write_tokenizer(tmp_path / "one"), ROWS).chat_template == CHATML
    assert _of(write_tokenizer(tmp_path / "none", template=None), ROWS).chat_template is None
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    assert _of(_configured(tmp_path / "list", chat_template=several), ROWS).chat_template == "usual"
    assert _of(_configured(tmp_path / "tools", chat_template=several[:1]), ROWS).chat_template is None
    folder = write_tokenizer(tmp_path / "file", template=None)
    (folder / "chat_template.jinja").write_text("from a file")
    assert _of(folder, ROWS).chat_template == "from a file"


def test_concurrent_calls_do_not_mix_up_control_tokens(tiny: MlxVocabulary) -> None:
    texts = [(text * 20, special) for text in ("<|im_end|>", "the list") for special in (True, False)]
    expected = {case: tiny.tokenize(case[0], special=case[1], start=False) for case in texts}
    wrong: list[object] = []

    def read(text: str, special: bool) -> None:
        found = [tiny.tokenize(text, special=special, start=False) for _ in range(100)]
        wrong.extend(tokens for tokens in found if tokens != expected[text, special])

    threads = [threading.Thread(target=read, args=case) for case in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_close_while_another_thread_tokenizes(tiny: MlxVocabulary) -> None:
    outcomes: list[type[BaseException]] = []
    begun = threading.Event()

    def read() -> None:
        try:
            while True:
                tiny.tokenize("the list of files", special=True, start=True)
                begun.set()
        except EdgespecError as error:
            outcomes.append(type(error))

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait(60)
    tiny.close()
    tiny.close()
    thread.join(60)
    assert outcomes == [ClosedError]
    with pytest.raises(ClosedError):
        tiny.piece(65)
    with pytest.raises(ClosedError):
        tiny.raw_piece(65)
    with pytest.raises(ClosedError):
        tiny.is_end(65)
