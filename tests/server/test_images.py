"""Images in the four APIs: each gives the reply of the Python API, or a single clear error."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import edgespec
from edgespec import Image, Message, PlacedImage
from tests.backends.tiny_vision import VisionModel, jpeg_bytes, picture, png_bytes, write_vision_model
from tests.server.conftest import running

PHOTO = png_bytes(picture())
ENCODED = base64.b64encode(PHOTO).decode()
URL = f"data:image/png;base64,{ENCODED}"
QUESTION = "the file list"
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
CHAT_PART = {"type": "image_url", "image_url": {"url": URL}}
TEXT = {"type": "text", "text": QUESTION}
SOURCE = {"type": "base64", "media_type": "image/png", "data": ENCODED}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return write_vision_model(tmp_path_factory.mktemp("gemma3"), "gemma3")


OPTIONS: dict[str, Any] = {"gpu_layers": 0, "context": 512, "exactness": "bits", "measure_costs": False}


@pytest.fixture(scope="module")
def address(files: VisionModel) -> Iterator[str]:
    with running(target=str(files.model), draft="none", load_options=OPTIONS) as server:
        yield server.url


@pytest.fixture
def vision(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def expected(files: VisionModel) -> dict[int, str]:
    """Return the replies for an image before the text (0) and after it (13)."""
    with edgespec.load(files.model, "none", threads=1, **OPTIONS) as runtime:
        image = Image.read(PHOTO)
        return {
            at: runtime.reply([Message("user", QUESTION, images=(PlacedImage(image, at),))], **SHORT).text
            for at in (0, len(QUESTION))
        }


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **SHORT}


def reply_text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "choices" in body:
        return str(body["choices"][0]["message"]["content"])
    if "output" in body:
        return "".join(part["text"] for item in body["output"] for part in item.get("content", ()))
    if "content" in body:
        return "".join(block["text"] for block in body["content"])
    return str(body["response"] if "response" in body else body["message"]["content"])


RESPONSES = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": QUESTION}]
OLLAMA = {"stream": False, "options": {"temperature": 0, "num_predict": 8}}
REQUESTS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", content(CHAT_PART, TEXT), 0),
    ("/v1/chat/completions", content(TEXT, CHAT_PART), len(QUESTION)),
    ("/v1/responses", {"input": [{"role": "user", "content": RESPONSES}], "max_output_tokens": 8}, 0),
    ("/v1/responses", {"input": RESPONSES, "max_output_tokens": 8}, 0),
    ("/v1/messages", content({"type": "image", "source": SOURCE}, TEXT), 0),
    ("/v1/messages", content(TEXT, {"type": "image", "source": SOURCE}), len(QUESTION)),
    ("/api/chat", {"messages": [{"role": "user", "content": QUESTION, "images": [ENCODED]}], **OLLAMA}, 0),
    ("/api/generate", {"prompt": QUESTION, "images": [ENCODED], **OLLAMA}, 0),
]


@pytest.mark.long
@pytest.mark.parametrize(("path", "body", "at"), REQUESTS)
def test_replies_equal_those_of_the_python_api(
    vision: httpx.Client, expected: dict[int, str], path: str, body: dict[str, Any], at: int
) -> None:
    answer = vision.post(path, json={"temperature": 0, **body} if path == "/v1/responses" else body)
    assert reply_text(answer) == expected[at]


DAMAGED = base64.b64encode(jpeg_bytes(picture(300, 200))[:2000]).decode()


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (
            "/v1/chat/completions",
            content({"type": "image_url", "image_url": {"url": "https://a.example/a.png"}}, TEXT),
            "unsupported_content",
        ),
        (
            "/v1/chat/completions",
            content({"type": "image_url", "image_url": f"data:image/jpeg;base64,{DAMAGED}"}, TEXT),
            "attachment_unreadable",
        ),
        (
            "/v1/chat/completions",
            content({"type": "input_audio", "input_audio": {}}, TEXT),
            "unsupported_content",
        ),
    ],
)
def test_other_images_give_one_clear_error(
    vision: httpx.Client, path: str, body: dict[str, Any], code: str
) -> None:
    answer = vision.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["param"] == "messages.0.content.0"


def test_a_text_model_refuses_images(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=content(CHAT_PART, TEXT))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "images_not_supported"


def test_tokens_of_images_are_counted(vision: httpx.Client) -> None:
    block = {"type": "image", "source": SOURCE}
    with_image = vision.post("/v1/messages/count_tokens", json=content(block, TEXT))
    without = vision.post("/v1/messages/count_tokens", json=content(TEXT))
    # The image has 4 tokens, and a control token before and after them.
    assert with_image.json()["input_tokens"] >= without.json()["input_tokens"] + 6


def test_ollama_clients_learn_that_the_model_sees(vision: httpx.Client, files: VisionModel) -> None:
    answer = vision.post("/api/show", json={"model": str(files.model)})
    assert "vision" in answer.json()["capabilities"]
