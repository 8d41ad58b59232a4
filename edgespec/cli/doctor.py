"""`edgespec doctor`: check the machine, the libraries, the folders and the default model."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from edgespec.cli.failures import DONE, FAILED
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import declared_options, json_option
from edgespec.cli.screen import ProgressLine, print_json, printable
from edgespec.errors import CancelledError, EdgespecError
from edgespec.options.default_model import default_model, why_toy
from edgespec.system.disks import free_bytes, write_error
from edgespec.system.files import error_reason, format_bytes, format_rate, write_advice
from edgespec.system.gpus import with_nvidia_memory
from edgespec.system.installation import build_command, setup_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from edgespec.api.machine import Gpu, InstalledGpu, MachineInfo

__all__ = ["Check", "command"]

_REPLY_TOKENS = 16
# Speed below which the default model is reported as slow. On an idle machine, the demo model is several times
# faster than this, and SmolLM2 is twice as fast.
_SLOW_TOKENS_PER_SECOND = 50
_LOW_MEMORY_BYTES = 2_000_000_000
# Packages to install before compiling llama.cpp, keyed by kind of GPU.
_GPU_PACKAGES = {
    "cuda": "the CUDA toolkit (Debian, Ubuntu: apt install nvidia-cuda-toolkit)",
    "vulkan": "Vulkan's headers and compiler (Debian, Ubuntu: apt install libvulkan-dev spirv-headers glslc)",
}
_GPU_DRIVERS = {
    "cuda": "NVIDIA's driver, until `nvidia-smi` lists the GPU",
    "vulkan": "a Vulkan driver (Debian, Ubuntu: apt install mesa-vulkan-drivers)",
}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        ok: False if there is a problem.
        finding: The result in words.
        next_step: What the user can do about the problem. May be empty.
    """

    name: str
    ok: bool
    finding: str
    next_step: str = ""


@click.command(
    "doctor",
    cls=HelpfulCommand,
    short_help="Check this machine and the installation.",
    params=declared_options("workers"),
    examples=("edgespec doctor", "edgespec doctor --json", "edgespec doctor --workers 192.168.1.20:50052"),
)
@json_option
def command(as_json: bool, workers: str | None) -> int:
    """Check this machine, the installed libraries, the folders and the settings, and run the default model.

    Each warning says what to do next. To detect full and read-only disks, edgespec writes and deletes a small
    file in each folder. With --workers, it also checks each worker and measures the connection to it. The
    exit status is 1 if the default model does not run, or if a worker cannot be used.
    """
    from edgespec.api.machine import inspect_machine
    from edgespec.cli.checked_workers import check_workers

    machine = inspect_machine()
    checks = [*_hardware(machine), *_libraries(machine), *_folders(machine), _settings()]
    checked = []
    if workers is not None:
        checked = interruptible(lambda stop: check_workers(workers, machine.llama_cpp.version, stop))
    for worker in checked:
        next_step = worker.error.next_step if worker.error else ""
        checks.append(Check(f"worker {worker.address}", worker.error is None, worker.finding, next_step))
    model = interruptible(_default_model)
    checks.append(model)
    if as_json:
        report: dict[str, object] = {
            "machine": machine.to_json(),
            "checks": [asdict(check) for check in checks],
        }
        if workers is not None:
            report["workers"] = [worker.to_json() for worker in checked]
        print_json(report)
    else:
        _print(checks)
    return FAILED if not model.ok or any(worker.error for worker in checked) else DONE


def _hardware(machine: MachineInfo) -> list[Check]:
    threads = machine.llama_cpp.default_threads
    cores = f"{machine.physical_cores} cores, {machine.logical_cores} threads" + (
        f"; edgespec uses {threads} {'thread' if threads == 1 else 'threads'}" if threads else ""
    )
    little = machine.memory_available_bytes < _LOW_MEMORY_BYTES
    available, total = machine.memory_available_bytes, machine.memory_total_bytes
    memory = f"{format_bytes(available)} of {format_bytes(total)} available"
    return [
        Check("edgespec", True, f"{machine.edgespec_version}, Python {machine.python_version}"),
        Check("system", True, machine.system),
        Check("processor", True, f"{machine.cpu}: {cores}"),
        Check("memory", not little, memory, "close other programs before loading a model" if little else ""),
    ]


def _libraries(machine: MachineInfo) -> list[Check]:
    library = machine.llama_cpp
    if library.problem:
        llama = Check("llama.cpp", False, library.problem, "run `edgespec doctor --json` for full details")
        return [llama, _mlx(machine)]
    return [_llama_cpp(machine), _gpu(machine), _mlx(machine)]


def _llama_cpp(machine: MachineInfo) -> Check:
    library = machine.llama_cpp
    finding = f"llama-cpp-python {library.version}"
    if not library.amx_problem:
        return Check("llama.cpp", True, finding)
    # AMX fails if the compiler of llama.cpp is faulty.
    build = f"CC=clang CXX=clang++ {build_command(library.version)}"
    return Check(
        "llama.cpp",
        True,
        f"{finding}; AMX is off, because {library.amx_problem}",
        f"to use AMX, build llama.cpp with another compiler, such as Clang: run {build}",
    )


def _gpu(machine: MachineInfo) -> Check:
    """Report the GPUs that llama.cpp uses, or how to make it use this machine's GPU."""
    gpus, built = machine.llama_cpp.gpus, machine.llama_cpp.gpu_library
    unused = _unused_gpus(machine)
    names = " and ".join(map(_describe_installed, unused))
    cuda = f"install {_GPU_PACKAGES['cuda']}, then run {setup_command('cuda')}"
    if gpus:
        finding = "; ".join(map(_describe_gpu, gpus)) + (f"; not used: {names}" if unused else "")
        # A GPU of another vendor may be unused on purpose, because llama.cpp prefers a faster one.
        has_cuda = any(gpu.name.startswith("CUDA") for gpu in gpus)
        is_missing = not has_cuda and any(gpu.vendor == "NVIDIA" for gpu in unused)
        return Check("gpu", True, finding, cuda if is_missing else "")
    if built.problem:
        finding = f"llama.cpp's {built.name} library cannot be loaded: {built.problem}"
        return Check("gpu", False, finding, f"install {_GPU_DRIVERS[built.name]}")
    if not machine.accelerator:
        return Check("gpu", True, "none found; models run on the CPU")
    owner = names or machine.accelerator.upper()
    finding = f"this machine has a GPU ({owner}), but llama.cpp does not use it"
    if machine.accelerator == "metal":
        build = build_command(machine.llama_cpp.version, "-DGGML_METAL=on")
        return Check("gpu", False, finding, f"run {build}")
    if built.name:
        return Check("gpu", False, finding, f"install {_GPU_DRIVERS[built.name]}")
    if machine.accelerator == "cuda":
        return Check("gpu", False, finding, cuda)
    vulkan = f"install {_GPU_PACKAGES['vulkan']}, then run {setup_command('vulkan')}"
    return Check("gpu", False, finding, vulkan)


def _unused_gpus(machine: MachineInfo) -> Sequence[InstalledGpu]:
    """Return the GPUs that llama.cpp does not use, with their memory, if their addresses are known."""
    gpus = machine.installed_gpus
    if used := {gpu.pci_address for gpu in machine.llama_cpp.gpus}:
        gpus = tuple(gpu for gpu in gpus if gpu.pci_address and not used & {gpu.pci_address, ""})
    return with_nvidia_memory(gpus)


def _describe_installed(gpu: InstalledGpu) -> str:
    return f"{gpu.name}, {format_bytes(gpu.memory_bytes)}" if gpu.memory_bytes else gpu.name


def _describe_gpu(gpu: Gpu) -> str:
    if not gpu.has_own_memory:
        return f"{gpu.description} ({gpu.name}), shares main memory"
    free, total = format_bytes(gpu.free_bytes), format_bytes(gpu.total_bytes)
    return f"{gpu.description} ({gpu.name}): {free} of {total} free"


def _mlx(machine: MachineInfo) -> Check:
    library = machine.mlx
    extra = "mlx-cuda" if machine.accelerator == "cuda" else "mlx"
    install = setup_command(extra)
    if not library.version:
        # Report missing MLX only on Apple Silicon, where it is the faster backend.
        wanted = machine.accelerator == "metal" or library.is_installed
        finding = (
            library.problem
            if wanted
            else f"{library.problem}; needed only for MLX models. To install it, run {install}"
        )
        return Check("mlx", not wanted, finding, f"run {install}" if wanted else "")
    finding = f"mlx {library.version}, mlx-lm {library.lm_version}, on {library.device}"
    if library.working_set_bytes:
        finding += f", with up to {format_bytes(library.working_set_bytes)} of GPU memory"
    if machine.accelerator == "cuda" and not library.cuda:
        finding += "; this machine has CUDA, but MLX was installed without CUDA support"
        return Check("mlx", True, finding, f"run {install}")
    return Check("mlx", True, finding)


def _folders(machine: MachineInfo) -> list[Check]:
    folders = machine.folders
    logs = "" if sys.platform == "darwin" else "XDG_STATE_HOME"
    return [
        _folder("models", folders.models, "HF_HUB_CACHE"),
        _folder("chats", folders.chats, "EDGESPEC_DATA_DIR"),
        _folder("cache", folders.cache, "EDGESPEC_CACHE_DIR"),
        _folder("logs", folders.logs, logs),
        _folder("aliases", folders.aliases, "EDGESPEC_CONFIG_DIR"),
    ]


def _folder(name: str, path: Path, variable: str) -> Check:
    """Check that files can be written to a folder or next to a file.

    Args:
        name: The kind of files in the folder, such as `models`.
        path: The folder or file, which need not exist.
        variable: The environment variable that overrides the folder.
    """
    folder = path.parent if path.suffix else path
    missing = "" if path.exists() else " (not created yet)"
    try:
        free = f"; {format_bytes(free_bytes(folder))} free"
    except OSError:
        free = ""
    error = write_error(folder)
    if error is None:
        return Check(name, True, f"{path}{missing}{free}")
    finding = f"{path} cannot be written: {error_reason(error)}{free}"
    return Check(name, False, finding, write_advice(error, folder, variable))


def _settings() -> Check:
    from edgespec.cli.settings import Settings

    settings = Settings.read()
    for problem in settings.problems:
        return Check("settings", False, problem.what, problem.next_step)
    there = "" if settings.path.exists() else " (not created yet)"
    return Check("settings", True, f"{settings.path}{there}")


def _default_model(stop: Stop) -> Check:
    import edgespec

    name = default_model()
    started = time.perf_counter()
    try:
        with ProgressLine(stop) as progress, edgespec.load(name, progress=progress) as runtime:
            load_seconds = time.perf_counter() - started
            stop.on_request(runtime.cancel)
            reply = runtime.generate(
                "How do I list files?", max_tokens=_REPLY_TOKENS, temperature=0.0, seed=0
            )
    except CancelledError:
        raise
    except EdgespecError as error:
        return Check(name, False, error.what, error.next_step)
    if reply.finish_reason == "cancelled":
        raise CancelledError(f"testing {name} was cancelled")
    rate = reply.stats.tokens_per_second or 0.0
    method = f"(method {reply.method.effective})"
    if reply.method.effective == "none":
        method = "(speed-up off, because it would not help here)"
    finding = (
        f"loaded in {load_seconds:.2f} s, generated {reply.stats.generated_tokens} tokens"
        f" at {format_rate(rate)} tokens/s {method}"
    )
    if rate < _SLOW_TOKENS_PER_SECOND:
        busy = "close other programs that use the CPU, or lower --threads"
        return Check(name, True, f"{finding}; this is slow", busy)
    missing = why_toy(name)
    return Check(name, True, finding, f"{missing}; to install it, run {setup_command()}" if missing else "")


def _print(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    colour = False if os.environ.get("NO_COLOR") else None
    for check in checks:
        warns = not check.ok or bool(check.next_step)
        mark = click.style("warn", "yellow") if warns else click.style("ok  ", "green")
        click.echo(f"{mark}  {check.name:{width}}  {printable(check.finding)}", color=colour)
        if check.next_step:
            click.echo(f"      {'':{width}}  next: {printable(check.next_step)}")
