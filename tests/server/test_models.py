"""Models are loaded on request, within one memory budget, and unloaded when they are idle."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import (
    BusyError,
    CancelledError,
    ClosedError,
    ModelFileError,
    ModelNotFoundError,
    OptionError,
)
from edgespec.server.models import ModelPool
from edgespec.server.settings import ServerSettings
from edgespec.store.catalogue import user_aliases_path
from edgespec.system.files import format_bytes
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.raising import raises
from tests.store.fake_stores import OllamaStore

# A demo model needs about 90 MiB with a context of 256 tokens, and Python 80 MiB.
ROOM_FOR_ONE, ROOM_FOR_TWO = "200MiB", "300MiB"


def pool_test(**settings: Any) -> Callable[[Callable[[ModelPool], Awaitable[None]]], None]:
    """Run a coroutine function with a pool, and close the pool."""

    def run(test: Callable[[ModelPool], Awaitable[None]]) -> None:
        async def body() -> None:
            options = {"context": 256, "memory": ROOM_FOR_TWO, "prefix_cache": "none", "measure_costs": False}
            options |= settings.pop("load_options", {})
            pool = ModelPool(ServerSettings(draft="none", load_options=options, **settings))
            try:
                async with asyncio.timeout(60):
                    await test(pool)
            finally:
                await pool.close()

        asyncio.run(body())

    return run


@pytest.fixture
def tiny_mlx(tmp_path: Path) -> Iterator[str]:
    """Write a tiny MLX model, and return the alias by which requests refer to it."""
    folder = write_checkpoint(tmp_path / "tiny", "llama")
    user_aliases_path().write_text(f'[aliases]\ntiny-mlx = "{folder}"\n')
    yield "tiny-mlx"
    user_aliases_path().unlink()


def names(pool: ModelPool) -> list[str]:
    return [model.name for model in pool.loaded]


async def use(pool: ModelPool, name: str | None) -> None:
    async with pool.borrow(name) as model:
        assert await asyncio.to_thread(lambda: model.queue.stream("Hello", max_tokens=2).wait().tokens)


@pytest.mark.long
def test_models_that_fit_stay_loaded() -> None:
    @pool_test()
    async def test(pool: ModelPool) -> None:
        await use(pool, None)
        await use(pool, "demo-draft")
        await use(pool, "demo")
        assert names(pool) == ["demo", "demo-draft"]


@pytest.mark.long
def test_options_of_gguf_models_do_not_apply_to_mlx_models(tiny_mlx: str) -> None:
    @pool_test(load_options={"threads": 1, "flash_attention": "off", "gpu_layers": 0, "kv_type": "q8_0/f16"})
    async def test(pool: ModelPool) -> None:
        await use(pool, "demo")
        await use(pool, tiny_mlx)
        assert tiny_mlx in names(pool)

    @pool_test(load_options={"threads": 1}, target=tiny_mlx)
    async def refused(pool: ModelPool) -> None:
        with raises(OptionError, code="option_without_effect", option="threads"):
            await use(pool, None)


def test_the_log_says_that_replies_run_one_after_the_other(
    tiny_mlx: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "edgespec")

    @pool_test(load_options={"parallel": 2})
    async def test(pool: ModelPool) -> None:
        await use(pool, None)
        assert "replies run one after the other" not in caplog.text
        await use(pool, tiny_mlx)
        assert "tiny cannot generate several replies at once" in caplog.text


def test_the_log_says_how_much_memory_a_model_uses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("edgespec.server"), "propagate", True)
    caplog.set_level(logging.INFO, "edgespec")

    @pool_test(load_options={"prefix_cache": "memory", "prefix_cache_memory": "5MiB"})
    async def test(pool: ModelPool) -> None:
        await use(pool, "demo")
        plan = pool.loaded[0].runtime.plan
        assert plan is not None
        assert (
            f"loaded demo: uses up to {format_bytes(plan.total_bytes)} of memory, plus up to 5.0 MiB"
            in caplog.text
        )


@pytest.mark.long
def test_models_that_do_not_fit_replace_others() -> None:
    @pool_test(load_options={"memory": ROOM_FOR_ONE})
    async def test(pool: ModelPool) -> None:
        await use(pool, None)
        await use(pool, "demo-draft")
        assert names(pool) == ["demo-draft"]
        await use(pool, "demo")
        assert names(pool) == ["demo"]


@pytest.mark.long
def test_a_model_in_use_is_unloaded_only_afterwards() -> None:
    @pool_test(load_options={"memory": ROOM_FOR_ONE})
    async def test(pool: ModelPool) -> None:
        async with pool.borrow("demo") as model:
            other = asyncio.create_task(use(pool, "demo-draft"))
            while names(pool) == ["demo"]:
                await asyncio.sleep(0.01)
            # The model is being unloaded, so a new request waits for its turn instead of keeping it loaded.
            again = asyncio.create_task(use(pool, "demo"))
            await asyncio.sleep(0.3)
            assert not other.done()
            assert not again.done()
            assert (await asyncio.to_thread(model.queue.stream("Hi", max_tokens=2).wait)).tokens
        await other
        await again
        assert names(pool) == ["demo"]


def test_a_cancelled_request_does_not_cancel_loading_for_others() -> None:
    @pool_test()
    async def test(pool: ModelPool) -> None:
        first, second = (asyncio.create_task(use(pool, "demo")) for _ in range(2))
        await asyncio.sleep(0.02)
        first.cancel()
        await second
        assert names(pool) == ["demo"]


def test_too_many_requests_for_a_model_that_is_loading() -> None:
    @pool_test(max_waiting=2)
    async def test(pool: ModelPool) -> None:
        tasks = [asyncio.create_task(use(pool, "demo")) for _ in range(6)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results].count(BusyError) == 3


def test_idle_models_are_unloaded() -> None:
    @pool_test(idle_unload_seconds=0.2)
    async def test(pool: ModelPool) -> None:
        unloading = asyncio.create_task(pool.unload_idle())
        async with pool.borrow("demo"):
            await asyncio.sleep(0.6)
            assert names(pool) == ["demo"]
        while names(pool):
            await asyncio.sleep(0.05)
        await use(pool, "demo")
        assert names(pool) == ["demo"]
        unloading.cancel()


def test_a_failed_load_is_reported_and_tried_again() -> None:
    @pool_test(target="demo", load_options={"kv_type": "nonsense"})
    async def test(pool: ModelPool) -> None:
        for _ in range(2):
            with pytest.raises(OptionError):
                await use(pool, "demo")
        assert names(pool) == []


def test_closing_ends_waiting_requests() -> None:
    @pool_test(load_options={"memory": ROOM_FOR_ONE})
    async def test(pool: ModelPool) -> None:
        async with pool.borrow("demo"):
            waiting = asyncio.create_task(use(pool, "demo-draft"))
            await asyncio.sleep(0.3)
            closing = asyncio.create_task(pool.close())
            await asyncio.sleep(0.1)
        await closing
        with pytest.raises((ClosedError, CancelledError)):
            await waiting
        with pytest.raises(ClosedError):
            await use(pool, "demo")


@pytest.mark.long
def test_which_models_requests_can_name(
    demo_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "mine.gguf"
    os.link(demo_draft, link)
    # A file in the current folder can have the name of a model.
    os.link(demo_draft, tmp_path / "other")
    monkeypatch.chdir(tmp_path)

    @pool_test(target=str(link))
    async def test(pool: ModelPool) -> None:
        for path in (str(demo_draft), "../mine.gguf", "other", "~/x.gguf", "/dev/zero"):
            with raises(ModelNotFoundError, "path of"):
                await use(pool, path)
        user_aliases_path().write_text(f'[aliases]\nnamed = "{demo_draft}"\n')
        try:
            await use(pool, "named")
            known = await pool.known()
            for name in (
                "mine.gguf",
                "mine",
                str(link),
                "named",
                "demo-draft:latest",
                "demo-draft",
                *VARIANTS,
            ):
                shown = await pool.describe(name)
                assert shown.name == ("mine.gguf" if "mine" in name else name)
                assert shown.info
                # The served file and the file behind the alias are the same, but have different paths.
                assert bool(shown.loaded) == ("mine" not in name)
        finally:
            user_aliases_path().unlink()
        listed = [model.name for model in known]
        assert listed[:3] == ["mine.gguf", "named", "demo"]
        assert "demo-draft" in listed  # It is the file that the user named, but has a name of its own.
        assert all(model.info and model.format == "gguf" for model in known[:3])


# Names of the same model as clients and gateways write them.
VARIANTS = ("DEMO-DRAFT:LATEST", "Demo-Draft", "openai/demo-draft", "OLLAMA/demo-draft:latest")


def test_names_without_a_tag_are_the_same_everywhere(
    demo_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    OllamaStore(tmp_path / "ollama").add("fine", "latest", demo_draft.read_bytes())

    @pool_test(target="demo")
    async def test(pool: ModelPool) -> None:
        for name in ("fine", "fine:latest", "ollama:fine"):
            await use(pool, name)
            shown = await pool.describe(name)
            assert shown.name == name
            assert shown.loaded
            assert shown.info
        assert "fine:latest" in [model.name for model in await pool.known()]
        assert len(pool.loaded) == 1
        await pool.unload("fine")
        assert not pool.loaded
        # An alias whose model is missing names both.
        user_aliases_path().write_text('[aliases]\nlost = "hf:user/repo"\n')
        try:
            with raises(ModelNotFoundError, "stands"):
                await use(pool, "lost")
        finally:
            user_aliases_path().unlink()


def test_a_damaged_model_does_not_replace_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    OllamaStore(tmp_path / "ollama").add("broken", "latest", b"GGUF" + bytes(2000))

    @pool_test(target="demo")
    async def test(pool: ModelPool) -> None:
        await use(pool, "demo")
        with pytest.raises(ModelFileError):
            await use(pool, "broken")
        assert names(pool) == ["demo"]
