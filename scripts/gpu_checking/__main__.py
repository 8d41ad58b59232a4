"""Check edgespec on a machine with a GPU and no network, and write a report.

    scripts/check_gpu --carry wheels      # first, on a machine with a network
    scripts/check_gpu --wheels wheels     # on the GPU machine: install, then run all checks
    scripts/check_gpu --only bench        # run one check again
    scripts/check_gpu --cpu --quick       # a short run on the CPU

`--carry` downloads the pinned packages and everything that is needed to build llama-cpp-python. Use the same
operating system, processor type and Python version as on the GPU machine. `--wheels` installs the packages in
build/check_gpu, and builds llama-cpp-python with support for the GPU. Later runs reuse this installation.

The checks are `doctor`, `gpu-tests` (the tests of scripts/test_gpu), `classes`, `verify` and
`verify-layerskip` (temperatures 0 and 0.8), `parity` (tests), `bench`, and `plan-all`, `plan-half` and
`plan-0`, which compare planned with measured memory for several numbers of layers on the GPU. `classes`
reports which passes agree bit for bit, for the demo model and the files of scripts/real_models. With
--target, `classes-given`, `verify-given` and `bench-given` check that model, and the plan steps use it
instead of the demo model. On CUDA, the measured memory is that of all cards, so nothing else should use them.

A failed check does not stop the others. The report is build/check_gpu/report.md, with the same content in
report.json. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

from edgespec.system.installation import BUILD_FLAGS
from scripts.gpu_checking.gpu import CheckError, Gpu, find_gpu, find_nvcc
from scripts.gpu_checking.report import read_report, write_report
from scripts.gpu_checking.steps import ROOT, Result, Step, create_steps, run_step

_PINS = ROOT / "requirements" / "dev.txt"
_BUILD = ROOT / "build" / "check_gpu"
_INSTALL_SECONDS = 3600.0
_VERSIONS = """
import edgespec
from importlib.metadata import PackageNotFoundError, version
print("edgespec", edgespec.__version__)
for name in ("llama-cpp-python", "mlx", "mlx-lm", "numpy"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "not installed")
"""


def main() -> int:
    """Run the checks and write the report. Return 1 if a check failed or could not run."""
    parser = argparse.ArgumentParser(
        prog="scripts/check_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--carry", type=Path, metavar="FOLDER", help="download all packages to FOLDER, and stop"
    )
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install the packages in FOLDER first")
    parser.add_argument("--cpu", action="store_true", help="run the checks on the CPU")
    parser.add_argument("--quick", action="store_true", help="few prompts and tests: a few minutes")
    parser.add_argument(
        "--only", action="append", metavar="STEP", help="run this step and keep other results"
    )
    parser.add_argument("--target", type=Path, metavar="FILE", help="also check this model")
    parser.add_argument("--draft", type=Path, metavar="FILE", help="draft model for --target")
    parser.add_argument("--minutes", type=float, default=30, help="time limit of each step (default: 30)")
    parser.add_argument(
        "--results",
        type=Path,
        default=_BUILD,
        metavar="FOLDER",
        help="folder for the report (default: build/check_gpu)",
    )
    args = parser.parse_args()
    if args.draft and not args.target:
        parser.error("--draft needs --target")
    for path in filter(None, (args.target, args.draft, args.wheels)):
        if not path.exists():
            parser.error(f"{path} does not exist")
    target, draft = (path and path.absolute() for path in (args.target, args.draft))
    all_steps = create_steps("cpu" if args.cpu else "cuda", target, draft, quick=args.quick)
    names = [step.name for step in all_steps]
    for name in args.only or ():
        if name not in names:
            parser.error(f"--only {name} is not a step; choose from {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.carry:
            carry(args.carry)
            return 0
        gpu = Gpu("cpu", "not used") if args.cpu else find_gpu()
        steps = create_steps(gpu.kind, target, draft, quick=args.quick)
        return run(args, gpu, [step for step in steps if not args.only or step.name in args.only])
    except (CheckError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\nInterrupted. The report has the finished steps; add the others with --only.", file=sys.stderr
        )
        return 130


def carry(folder: Path) -> None:
    """Download the pinned packages, and what llama-cpp-python needs for a build, to a folder."""
    pip = [sys.executable, "-m", "pip", "download", "--dest", str(folder)]
    source_only = ["--no-binary", "llama-cpp-python"]
    subprocess.run([*pip, *source_only, "--require-hashes", "-r", str(_PINS)], check=True)
    source = next(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(source) as archive:
        member = archive.extractfile(f"{source.name.removesuffix('.tar.gz')}/pyproject.toml")
        assert member is not None
        requires = tomllib.loads(member.read().decode())["build-system"]["requires"]
    subprocess.run([*pip, *requires, "cmake", "ninja"], check=True)


def run(args: argparse.Namespace, gpu: Gpu, steps: list[Step]) -> int:
    """Install the packages if requested, run the steps, and update the report after each step."""
    folder = args.results.absolute()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # The user's settings must not affect the checks, and nothing may be downloaded.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EDGESPEC_")}
    for name in ("DATA", "CACHE", "CONFIG"):
        environment[f"EDGESPEC_{name}_DIR"] = str(folder / name.lower())
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    if gpu.kind == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    built = _BUILD / f"venv-{gpu.kind}" / "bin" / "python"
    report = folder / "report.md"
    if args.wheels:
        print("installing the packages, which takes minutes", file=sys.stderr)
        build = environment | _build_environment(gpu)
        result = _install(args.wheels.absolute(), build, logs, built)
        if result.problem:
            write_report(report, {"GPU": gpu.name}, {"install": result})
            raise CheckError(
                "\n".join([f"installing failed: {result.problem}; see {report}", *result.output])
            )
    python = str(built) if built.exists() else sys.executable
    machine = _machine(gpu, python, environment) | {"run": "quick" if args.quick else "full"}
    results = read_report(report.with_suffix(".json"), machine) if args.only else {}
    for number, step in enumerate(steps, 1):
        label = f"[{number}/{len(steps)}] {step.name}"
        print(label, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
        result = run_step(step, label, python, logs, environment, args.minutes * 60)
        results[step.name] = result
        write_report(report, machine, results)
        start = "\r" if sys.stderr.isatty() else ""
        problem = f": {result.problem}" if result.problem else ""
        print(
            f"{start}{label} {result.status} in {result.seconds:.0f} s{problem}", file=sys.stderr, flush=True
        )
    print(f"report: {report}")
    return 1 if any(result.status == "failed" for result in results.values()) else 0


def _build_environment(gpu: Gpu) -> dict[str, str]:
    """Return the variables for building llama-cpp-python. Raises CheckError if there is no compiler."""
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        raise CheckError(f"{compiler} was not found; install a C++ compiler, or set CXX to the path of one")
    if gpu.kind == "cpu":
        return {"CMAKE_ARGS": BUILD_FLAGS}
    flags = f"{BUILD_FLAGS} -DGGML_{gpu.kind.upper()}=on"
    if gpu.kind == "cuda":
        return {"CUDACXX": find_nvcc(), "CMAKE_ARGS": f"{flags} -DCMAKE_CUDA_ARCHITECTURES=native"}
    return {"CMAKE_ARGS": flags}


def _install(wheels: Path, environment: dict[str, str], folder: Path, python: Path) -> Result:
    """Install the packages for `python` in its own virtual environment. Installed packages are kept."""
    if not python.exists():
        try:
            venv.create(python.parents[1], with_pip=True)
        except subprocess.CalledProcessError:
            message = f"{sys.executable} cannot create virtual environments; install its venv package"
            raise CheckError(message) from None
    pip = ("-m", "pip", "install", "--no-cache-dir", "--no-index", "--find-links", str(wheels))
    packages = ("--no-binary", "llama-cpp-python", "--require-hashes", "-r", str(_PINS))
    step = Step("install", ((*pip, *packages),), lambda _: ({}, ""))
    return run_step(step, "installing", str(python), folder, environment, _INSTALL_SECONDS)


def _machine(gpu: Gpu, python: str, environment: dict[str, str]) -> dict[str, str]:
    """Return the machine and the versions of the packages, for the report."""
    command = [python, "-c", _VERSIONS]
    completed = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    versions = dict(line.split(" ", 1) for line in completed.stdout.splitlines())
    system = f"{platform.system()} {platform.release()} ({platform.machine()})"
    return {"GPU": gpu.name, "system": system, "Python": platform.python_version(), **versions}


if __name__ == "__main__":
    sys.exit(main())
