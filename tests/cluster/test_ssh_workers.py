"""Workers that edgespec starts over SSH on the tests' own sshd, or through a replacement for `ssh`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import edgespec
from edgespec.backends.llamacpp.native import library
from edgespec.cli.checked_workers import check_workers
from edgespec.cli.interrupt import Stop
from edgespec.cluster import ssh
from edgespec.cluster.connected import probe_worker
from edgespec.cluster.machines import Device, SshAddress, WorkerAddress, WorkerStatus
from edgespec.cluster.ssh import reach_workers
from edgespec.errors import CancelledError, MemoryBudgetError, WorkerError, WorkerLostError
from tests.cases import first
from tests.cluster.conftest import Worker
from tests.cluster.test_spread_targets import PROMPT, run, tokens
from tests.raising import raises

MAC = SshAddress("ssh://mac")
# The folder of sshd is not in every user's PATH.
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
CLIENT = shutil.which("ssh")
ROOT = Path(edgespec.__file__).parents[1]


@dataclass
class Site:
    """The machine `ssh://mac`, with its own home folder."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def install(self, script: str) -> None:
        """Make `edgespec` a shell script on this machine."""
        write_program(self.home / ".local/bin/edgespec", f"echo $$ >{self.home}/pid\n{script}")

    def connection(self) -> psutil.Process:
        """Return the `ssh` process that this process has started."""
        (found,) = [each for each in psutil.Process().children() if "ssh://mac" in each.cmdline()]
        return found

    def wait_for_the_end(self) -> None:
        """Wait until the worker has ended."""
        pid, end = int((self.home / "pid").read_text()), time.monotonic() + 20
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.05)


def write_program(file: Path, script: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start_sshd(folder: Path) -> subprocess.Popen[bytes]:
    """Start an sshd that accepts the key `user`, and write an `ssh` configuration for the host `mac`."""
    assert SSHD
    for key in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/user.pub\nUsePAM no\nPasswordAuthentication no\n"
        f"KbdInteractiveAuthentication no\nSetEnv HOME={folder}/home\n"
    )
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"mac {key}\n")
    common = f"HostName 127.0.0.1\nPort {port}\nHostKeyAlias mac\nIdentitiesOnly yes\n"
    (folder / "config").write_text(
        f"Host mac mac2\nIdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\n{common}"
        f"Host refused\nIdentityFile {folder}/stranger\nUserKnownHostsFile {folder}/known\n{common}"
        f"Host unknown\nIdentityFile {folder}/user\nUserKnownHostsFile /dev/null\n{common}"
        f"Host gone\nHostName 127.0.0.1\nPort {free_port()}\n"
    )
    write_program(folder / "bin/ssh", f'exec {CLIENT} -F {folder}/config "$@"')
    server = subprocess.Popen([SSHD, "-D", "-f", folder / "sshd_config"], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return server
        except OSError:
            assert server.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.fixture(scope="module")
def sshd_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not (SSHD and CLIENT):
        pytest.skip("needs OpenSSH's client and server (Debian, Ubuntu: apt install openssh-server)")
    folder = tmp_path_factory.mktemp("sshd")
    server = start_sshd(folder)
    yield folder
    server.terminate()
    server.wait(10)


@pytest.fixture(scope="module")
def stand_in_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ssh")
    program = f"{sys.executable} -m tests.cluster.ssh_stand_in"
    write_program(folder / "bin/ssh", f'PYTHONPATH={ROOT} exec {program} {folder}/home "$@"')
    return folder


@pytest.fixture(params=["sshd" if SSHD and CLIENT else "stand_in"])
def site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Site:
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    site = Site(folder)
    site.install(f'PYTHONPATH={ROOT} exec {sys.executable} -m edgespec "$@" --threads 1')
    # A login shell can print other lines before the worker's.
    (site.home / ".profile").write_text("echo Welcome\necho '{\"port\": 1}'\n")
    return site


def test_a_target_on_workers_of_all_kinds_gives_the_same_tokens(
    site: Site, workers: tuple[Worker, Worker]
) -> None:
    spread = f"ssh://mac=200MiB,local=200MiB,{workers[0].address}=200MiB"
    assert tokens(spread) == tokens()
    site.wait_for_the_end()


def wait_for_each_other(site: Site) -> None:
    """Make each worker wait until two have been started."""
    site.install(
        f"cd {site.home}; touch started.$$\n"
        "until [ $(ls started.* | wc -l) = 2 ]; do sleep 0.05; done\n"
        f'PYTHONPATH={ROOT} exec {sys.executable} -m edgespec "$@"'
    )
    for earlier in site.home.glob("started.*"):
        earlier.unlink()


@pytest.mark.long
def test_several_workers_start_together(site: Site) -> None:
    wait_for_each_other(site)
    both = SshAddress("ssh://mac", 200 << 20), SshAddress("ssh://mac2")
    with reach_workers(both) as addresses:
        assert [address.ssh_url for address in addresses] == ["ssh://mac", "ssh://mac2"]
        assert [address.memory_bytes for address in addresses] == [200 << 20, None]
        assert not any(probe_worker(address).busy for address in addresses)
    site.wait_for_the_end()


@pytest.mark.long
def test_several_workers_are_checked_together(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_START_SECONDS", 20.0)
    wait_for_each_other(site)
    gone = f"127.0.0.1:{free_port()}"
    checked = check_workers(f"ssh://mac=1MiB,{gone},ssh://mac2=9TiB", library().__version__, Stop())
    assert [str(each.address) for each in checked] == ["ssh://mac", gone, "ssh://mac2"]
    errors = [each.error.what if each.error else "" for each in checked]
    assert not errors[0]
    assert "is unreachable: Connection refused" in errors[1]
    assert "the worker ssh://mac2 offers" in errors[2]
    site.wait_for_the_end()


@pytest.mark.long
def test_the_commands_start_and_end_the_worker(site: Site) -> None:
    report = json.loads(run("doctor", "--workers", "ssh://mac=1MiB", "--json").stdout)["workers"][0]
    assert report["address"] == "ssh://mac"
    assert report["error"] is None
    assert report["bytes_per_second"] > 1e6
    site.wait_for_the_end()
    plan = json.loads(run("plan", "--workers", "ssh://mac=200MiB", "--context", "1024", "--json").stdout)
    assert plan["machines"][-1]["name"] == "ssh://mac"
    site.wait_for_the_end()


@pytest.mark.long
def test_a_lost_connection_is_an_error_and_the_next_load_connects_again(site: Site) -> None:
    with edgespec.load("demo", "none", workers="ssh://mac", method="none", context=1024) as runtime:
        stream = runtime.stream(PROMPT, temperature=0.0, max_tokens=400)
        assert next(stream).text
        site.connection().kill()
        began = time.monotonic()
        with raises(WorkerLostError, "ssh://mac") as caught:
            list(stream)
        assert time.monotonic() - began < 5.0
    assert "edgespec worker" not in caught.value.next_step
    site.wait_for_the_end()
    assert tokens("ssh://mac")
    site.wait_for_the_end()


@pytest.mark.long
def test_a_frozen_connection_is_an_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.cluster.connected.SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(ssh, "_END_SECONDS", 0.5)
    with edgespec.load("demo", "none", workers="ssh://mac", method="none", context=1024) as runtime:
        site.connection().suspend()
        with raises(WorkerLostError, "ssh://mac"):
            runtime.generate(PROMPT, max_tokens=400)
    site.wait_for_the_end()


def error_of(url: str = "ssh://mac") -> str:
    with pytest.raises(WorkerError) as caught:
        edgespec.load("demo", None, workers=url)
    return str(caught.value)


def test_a_machine_without_edgespec_is_an_error(site: Site) -> None:
    (site.home / ".local/bin/edgespec").unlink()
    assert error_of().startswith("edgespec is not installed on ssh://mac, ")
    assert "scripts/setup workers" in error_of()


def test_the_error_of_a_worker_is_reported(site: Site) -> None:
    site.install("echo warning >&2; echo 'error: no RPC library; build it' >&2; echo more >&2; exit 1")
    assert error_of() == "the worker on ssh://mac did not start: no RPC library; build it"


def test_the_error_that_a_worker_prints_as_json_is_preferred(site: Site) -> None:
    error = {"code": "failed", "message": "no RPC library", "next_step": "build it"}
    site.install(f"echo motd; echo '{json.dumps({'error': error})}'; echo 'error: other' >&2; exit 1")
    assert error_of() == "the worker on ssh://mac did not start: no RPC library; build it"


def test_the_worker_hears_that_the_connection_works(site: Site) -> None:
    site.install("read first && echo 'error: heard' >&2; exit 1")
    assert error_of() == "the worker on ssh://mac did not start: heard"


_FAKE_WORKER = """
import json, socket, sys
port = int(sys.argv[-1].rpartition(":")[2])
with socket.create_server(("127.0.0.1", port)) as server:
    print(json.dumps({"port": port}), flush=True)
    client, _ = server.accept()
    client.recv(100)
    client.sendall(sys.argv[1].encode())
    sys.stdin.read()
"""


def install_worker_with_status(site: Site, version: str, *, busy: bool = False) -> None:
    status = WorkerStatus(edgespec.__version__, version, "7.0.0", (Device("CPU", 1 << 30),), 1 << 30, busy)
    (site.home / "fake.py").write_text(_FAKE_WORKER)
    (site.home / "status").write_bytes(status.to_line())
    site.install(f'exec {sys.executable} {site.home}/fake.py "$(cat {site.home}/status)\n" "$@"')


def test_another_version_and_a_busy_worker_and_too_little_memory_are_errors(
    site: Site, workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.cluster.connected._BUSY_SECONDS", 0.0)
    install_worker_with_status(site, "0.2.90")
    assert "the worker ssh://mac has llama-cpp-python 0.2.90, but this machine has" in error_of()
    version = workers[0].facts["llama_cpp"]
    install_worker_with_status(site, version, busy=True)
    assert "the worker ssh://mac is busy with another model" in error_of()
    install_worker_with_status(site, version)
    with raises(MemoryBudgetError, "ssh://mac", "1.0 GiB"):
        edgespec.load("demo", None, workers="ssh://mac=2GiB")
    site.wait_for_the_end()


def test_taken_ports_are_replaced(
    site: Site, workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = workers[0].port
    local, remote = [taken, free_port(), free_port()], [free_port(), taken, free_port()]
    monkeypatch.setattr(ssh, "_free_port", lambda: local.pop(0))
    monkeypatch.setattr(ssh, "_random_port", lambda: remote.pop(0))
    with reach_workers((MAC,)) as (address,):
        socket.create_connection((address.host, address.port)).close()
    assert not local
    local, remote = [free_port() for _ in range(9)], [taken] * 9
    with raises(WorkerError, "ssh://mac", code="worker_not_started"):
        reach_workers((MAC,)).__enter__()
    site.wait_for_the_end()


def test_connecting_can_be_cancelled(site: Site) -> None:
    site.install("exec cat >/dev/null")
    calls: list[str] = []

    def progress(what: str, _: float) -> bool:
        calls.append(what)
        return not (site.home / "pid").exists()

    (site.home / "pid").unlink(missing_ok=True)
    with raises(CancelledError, "ssh://mac"):
        reach_workers((MAC,), progress).__enter__()
    assert set(calls) == {"connecting to ssh://mac"}
    site.wait_for_the_end()


# `models list` checks workers as `doctor` does.
@pytest.mark.long
@pytest.mark.parametrize("arguments", first([("generate", "hello"), ("doctor",), ("models", "list")], 2))
def test_ctrl_c_while_connecting(arguments: tuple[str, ...], site: Site) -> None:
    site.install("exec cat >/dev/null")
    (site.home / "pid").unlink(missing_ok=True)
    command = [sys.executable, "-m", "edgespec", *arguments, "--workers", "ssh://mac"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not (site.home / "pid").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"connecting to ssh://mac was cancelled" in errors
    site.wait_for_the_end()


def test_a_worker_that_does_not_start_is_an_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("exec cat >/dev/null")
    monkeypatch.setattr(ssh, "_START_SECONDS", 3.0)
    assert error_of().startswith("the worker on ssh://mac did not start within 3 seconds")
    site.wait_for_the_end()


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("refused", "SSH key"),
        ("unknown", "host key"),
        ("gone", "unreachable"),
    ],
)
def test_a_failed_connection_is_one_line(
    host: str, message: str, sshd_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{sshd_folder}/bin:{os.environ['PATH']}")
    error = error_of(f"ssh://{host}")
    assert message in error
    assert f"`ssh ssh://{host}`" in error


def test_a_machine_without_ssh_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert error_of().startswith("cannot start the program `ssh` to connect to ssh://mac: ")


def test_other_addresses_need_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with reach_workers((WorkerAddress("host", 1),)) as addresses:
        assert addresses == (WorkerAddress("host", 1),)
