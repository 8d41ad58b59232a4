"""The division of layers, and the commands that plan with workers or check them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import edgespec
import edgespec.api.machine
from edgespec.cli.checked_workers import CheckedWorker, check_workers
from edgespec.cli.interrupt import Stop
from edgespec.cli.models import list_models
from edgespec.cluster import connected
from edgespec.cluster.connected import measure_link
from edgespec.cluster.machines import MEASURE, WorkerAddress, installed_mlx, split_layers
from edgespec.errors import MemoryBudgetError, WorkerError
from edgespec.loading import workers as on_workers
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.machine_speed import MachineSpeed, TypeSpeed
from tests.cluster.conftest import Worker
from tests.cluster.test_spread_targets import run
from tests.raising import raises

FAST = MachineSpeed({"Q8_0": TypeSpeed(CostCurve((1,), (1e-10,)), 1e-10)}, 1e-5)


@pytest.mark.long
def test_the_plan_is_that_of_the_loaded_model(workers: tuple[Worker, Worker]) -> None:
    spread = f"{workers[0].address}=200MiB,local=100MiB,{workers[1].address}=300MiB"
    planned = edgespec.plan("demo", None, workers=spread, context=1024).plan
    with edgespec.load("demo", None, workers=spread, context=1024) as runtime:
        assert runtime.plan is not None
        assert runtime.plan.machines == planned.machines
        facts = runtime.target
    here, *others = planned.machines
    assert [share.name for share in others] == [workers[0].address, workers[1].address]
    assert all(share.layers for share in planned.machines)
    # What llama.cpp really loaded here.
    assert here.weight_bytes == facts.weight_bytes
    whole = edgespec.plan("demo", None, context=1024).plan
    assert sum(share.weight_bytes for share in planned.machines) == planned_bytes(whole, "weights")
    assert sum(share.cache_bytes for share in planned.machines) == planned_bytes(whole, "cache")


def planned_bytes(plan: edgespec.MemoryPlan, kind: str) -> int:
    return sum(item.bytes for item in plan.items if item.kind == kind)


def test_the_command_prints_each_machine(workers: tuple[Worker, Worker]) -> None:
    both = f"{workers[0].address}=200MiB,{workers[1].address}=200MiB"
    done = run("plan", "--workers", both, "--context", "1024")
    assert done.exit_code == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("127.0.0.1")]
    assert [row[0] for row in rows] == [worker.address for worker in workers]
    assert "Sending the model to the workers takes at least" in done.stdout
    report = json.loads(run("plan", "--workers", both, "--context", "1024", "--json").stdout)
    assert report["machines"][0]["layers"] == 0
    assert len(report["workers"]["links"]) == 2
    assert report["workers"]["fits_on_this_machine"]


def test_layers_that_do_not_fit_and_a_busy_worker_are_errors(
    workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connected, "_BUSY_SECONDS", 0.3)
    with raises(MemoryBudgetError, "2.0 MiB"):
        edgespec.plan("demo", None, workers=f"{workers[0].address}=2MiB")
    with (
        edgespec.load("demo", None, workers=workers[0].address, context=1024),
        raises(WorkerError, code="worker_busy"),
    ):
        edgespec.plan("demo", None, workers=workers[0].address)


@pytest.mark.long
def test_the_connection_is_measured(
    workers: tuple[Worker, Worker], delayed: Callable[[int, float], int]
) -> None:
    speed = measure_link(WorkerAddress("127.0.0.1", delayed(workers[0].port, 0.01)))
    assert 0.02 <= speed.round_trip_seconds < 0.1
    assert speed.bytes_per_second > 1e6
    # A worker that is in use can be measured.
    with edgespec.load("demo", None, workers=workers[0].address, context=1024):
        assert measure_link(WorkerAddress("127.0.0.1", workers[0].port)).bytes_per_second > 1e6


@pytest.mark.parametrize("sent", [b"", b"\1", b"\5" + bytes(7) + b"abc", b"\xff" * 100], ids=list("abcd"))
def test_half_a_message_is_no_error(sent: bytes, workers: tuple[Worker, Worker]) -> None:
    with socket.create_connection(("127.0.0.1", workers[0].port), timeout=10) as connection:
        connection.sendall(MEASURE + sent)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert measure_link(WorkerAddress("127.0.0.1", workers[0].port)).bytes_per_second > 1e6


def predict(
    monkeypatch: pytest.MonkeyPatch, workers: str, here: MachineSpeed | None, there: dict[str, Any]
) -> on_workers.SpreadPrediction:
    monkeypatch.setattr(on_workers, "saved_machine_speed", lambda _: here)
    parse = on_workers._from_json
    monkeypatch.setattr(on_workers, "_from_json", lambda _: parse(there))
    spread = edgespec.plan("demo", None, workers=workers, context=1024).spread
    assert spread is not None
    return spread


def speed_json(monkeypatch: pytest.MonkeyPatch, speed: MachineSpeed) -> dict[str, Any]:
    monkeypatch.setattr(on_workers, "saved_machine_speed", lambda _: speed)
    values: dict[str, Any] = json.loads(json.dumps(on_workers.saved_speed_json()))
    return values


@pytest.mark.parametrize("busy_cores", [0.0, 1.0])
def test_workers_report_speeds_that_were_measured_while_they_were_busy(
    monkeypatch: pytest.MonkeyPatch, busy_cores: float
) -> None:
    values = speed_json(monkeypatch, replace(FAST, busy_cores=busy_cores))
    speed = on_workers._from_json(values)
    assert speed is not None
    assert speed.is_disturbed == (busy_cores > 0)
    del values["busy_cores"]  # Older versions do not send it.
    assert on_workers._from_json(values) == FAST


def test_one_machine_alone_is_faster_if_all_are_equal(
    monkeypatch: pytest.MonkeyPatch, workers: tuple[Worker, Worker]
) -> None:
    both = f"{workers[0].address}=200MiB,{workers[1].address}=200MiB"
    spread = predict(monkeypatch, both, FAST, speed_json(monkeypatch, FAST))
    trips = sum(link.round_trip_seconds for link in spread.links)
    alone = spread.alone["this machine"]
    assert spread.tokens_per_second == pytest.approx(1.0 / (1.0 / alone + trips))
    assert spread.faster_alone == "this machine"
    assert spread.alone.keys() == {"this machine", workers[0].address, workers[1].address}


def test_faster_workers_are_faster(monkeypatch: pytest.MonkeyPatch, workers: tuple[Worker, Worker]) -> None:
    slow = MachineSpeed({"Q8_0": TypeSpeed(CostCurve((1,), (1e-7,)), 1e-7)}, 1e-2)
    both = f"{workers[0].address}=200MiB,{workers[1].address}=200MiB"
    spread = predict(monkeypatch, both, slow, speed_json(monkeypatch, FAST))
    assert spread.tokens_per_second is not None
    assert spread.tokens_per_second > spread.alone["this machine"]
    assert spread.faster_alone in {worker.address for worker in workers}


@pytest.mark.long
@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"layer_seconds": 1.0},
        {"layer_seconds": 1.0, "seconds_per_byte": []},
        {"layer_seconds": 1.0, "seconds_per_byte": {}},
        {"layer_seconds": "x", "seconds_per_byte": {"Q8_0": 1e-9}},
        {"layer_seconds": 1e-3, "seconds_per_byte": {"Q8_0": float("nan")}},
        {"layer_seconds": 1e-3, "seconds_per_byte": {"Q8_0": 0}},
    ],
)
def test_what_was_not_measured_is_left_out(
    damaged: dict[str, Any], monkeypatch: pytest.MonkeyPatch, workers: tuple[Worker, Worker]
) -> None:
    spread = predict(monkeypatch, workers[0].address, FAST, damaged)
    assert spread.tokens_per_second is None
    assert spread.unmeasured == (workers[0].address,)
    assert spread.alone.keys() == {"this machine"}


def test_layers_follow_the_memory() -> None:
    assert split_layers([10] * 8, [100, 100]) == [4, 4]
    assert split_layers([10] * 8, [300, 100]) == [6, 2]
    assert split_layers([10] * 8, [0, 100]) == [0, 8]
    assert split_layers([10] * 8, [-5, 40, 40]) == [0, 4, 4]


def test_layers_that_do_not_fit() -> None:
    assert split_layers([10] * 8, [30, 40]) is None
    assert split_layers([10] * 8, [0, 0]) is None


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
    st.lists(st.integers(0, 300), min_size=1, max_size=6),
)
def test_no_device_gets_more_than_it_holds(layers: list[int], rooms: list[int]) -> None:
    counts = split_layers(layers, rooms)
    if counts is None:
        return
    assert sum(counts) == len(layers)
    first = 0
    for count, room in zip(counts, rooms, strict=True):
        assert sum(layers[first : first + count]) <= room
        first += count


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
