"""`edgespec doctor --workers` and `edgespec models list --workers`."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
from click.testing import CliRunner

import edgespec
import edgespec.api.machine
from edgespec.cli.checked_workers import CheckedWorker, check_workers
from edgespec.cli.interrupt import Stop
from edgespec.cli.models import list_models
from edgespec.cluster.status import installed_mlx
from tests.cluster.conftest import Worker
from tests.cluster.test_spread_targets import run


def test_the_command_reports_each_worker(workers: tuple[Worker, Worker]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    done = run("doctor", "--workers", f"{workers[0].address},{closed}", "--json")
    assert done.exit_code == 1
    reachable, unreachable = json.loads(done.stdout)["workers"]
    assert reachable["reachable"]
    assert reachable["error"] is None
    assert reachable["llama_cpp"] == workers[0].facts["llama_cpp"]
    assert reachable["mlx_lm"] == installed_mlx()
    assert reachable["round_trip_seconds"] > 0
    assert reachable["bytes_per_second"] > 1e6
    assert not unreachable["reachable"]
    assert "unreachable: Connection refused" in unreachable["error"]
    assert run("doctor", "--workers", "nonsense").exit_code == 2


def check(workers: str, llama_cpp: str) -> list[CheckedWorker]:
    return check_workers(workers, llama_cpp, Stop())


def test_each_error_is_one_line(workers: tuple[Worker, Worker], start_worker: Callable[..., Worker]) -> None:
    version = workers[0].facts["llama_cpp"]
    small = start_worker("--memory", "8MiB")
    with edgespec.load("demo", None, workers=workers[0].address, context=1024):
        checked = check(f"{workers[0].address},{workers[1].address},{small.address}=1GiB", version)
        other = check(workers[1].address, "0.0.1")
    errors = [each.error.what if each.error else "" for each in (*checked, *other)]
    assert "is busy with another model" in errors[0]
    assert not errors[1]
    assert "offers only 8.0 MiB of memory, but --workers requests 1.0 GiB" in errors[2]
    assert f"has llama-cpp-python {version}, but this machine has 0.0.1" in errors[3]
    for each in (*checked, *other):
        assert "MB/s" in each.finding
        assert "\n" not in each.finding


def test_the_list_of_models_says_which_fit_on_the_workers(
    workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fits(machines: str) -> dict[str, str]:
        done = CliRunner().invoke(list_models, ["--workers", machines, "--json"])
        listed = json.loads(done.stdout)
        assert [each["reachable"] for each in listed["workers"]] == [True]
        return {each["name"]: each["fits"] for each in listed["models"]}

    machine = replace(edgespec.api.machine.inspect_machine(), memory_available_bytes=2 << 30)
    monkeypatch.setattr(edgespec.api.machine, "inspect_machine", lambda: machine)
    assert "fits" not in json.loads(CliRunner().invoke(list_models, ["--json"]).stdout)["models"][0]
    small = fits(f"{workers[0].address}=1MiB")
    assert (small["demo"], small["llama-3.1-8b"], small["llama-3.3-70b"]) == ("this machine", "", "")
    large = fits(f"{workers[0].address}=1MiB,local=8GiB")
    assert (large["demo"], large["llama-3.1-8b"], large["llama-3.3-70b"]) == ("this machine", "workers", "")
    shown = CliRunner().invoke(list_models, ["--workers", workers[0].address]).stdout
    assert shown.splitlines()[0].split() == ["WORKER", "MEMORY", "ROUND", "TRIP", "STATUS"]
    assert "FITS" in shown
