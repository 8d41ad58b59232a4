"""The checks, their commands, and summaries of their output for the report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MODELS = ROOT / "models"
_REAL_MODELS = ROOT / "build" / "real-models"
_MIB = 2**20
# Largest allowed difference between planned and measured memory, as in scripts/bench_plan.py.
_NEAR_SHARE, _NEAR_BYTES = 0.03, 64 * _MIB
# Number of last lines of a failed step in the report, and the maximum length of each.
_LAST_LINES, _LINE_LENGTH = 20, 300
_DEMO_METHODS = "model,model+suffix,suffix,ngram,lookahead,lowbit,auto"

# Figures for the report, keyed by name, and a description of what is wrong with them, or an empty string.
Summary = tuple[dict[str, str], str]


@dataclass(frozen=True)
class Step:
    """One check.

    Attributes:
        commands: Arguments for Python. A failed command ends the step.
        summarise: Reads the standard output of all commands.
    """

    name: str
    commands: tuple[Sequence[str], ...]
    summarise: Callable[[list[str]], Summary]


@dataclass(frozen=True)
class Result:
    """The result of a step. `output` contains the last lines of a step that did not pass."""

    name: str
    status: str
    seconds: float
    figures: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    output: list[str] = field(default_factory=list)


def create_steps(kind: str, target: Path | None, draft: Path | None, *, quick: bool) -> list[Step]:
    """Return all checks for a GPU of the given kind, including those of the given models.

    Args:
        kind: `cuda`, `vulkan`, `metal` or `cpu`.
        target: A model to check in addition to the demo model.
        draft: Its draft model.
        quick: Use short replies, few tests and little time.
    """
    layers = ("--gpu-layers", "0") if kind == "cpu" else ()
    replies = ("--draft-lengths", "4", "-n", "16") if quick else ()
    demo = ("--target", "demo")
    verify = ("-m", "edgespec", "verify", "--json", "--temperatures", "0,0.8", *layers, *replies)
    seconds = ("--max-seconds", "30", "--repeats", "1", "-n", "32") if quick else ("--max-seconds", "900")
    bench = ("-m", "edgespec", "bench", "--json", *layers, *seconds)
    prepare = ("-m", "edgespec", "prepare")
    tests = ("-k", "a_method_says and llama.cpp and full") if quick else ()
    models = ("--target", str(target), *(("--draft", str(draft)) if draft else ()))
    find_classes = ("-m", "scripts.gpu_checking.width_classes", *layers)
    class_models = [_MODELS / "demo-target-q8_0.gguf"]
    if not quick:
        class_models += sorted(_REAL_MODELS.glob("*.gguf"))
    parity = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/parity", "tests/test_parity.py", *tests)
    steps = [
        Step("doctor", (("-m", "edgespec", "doctor", "--json"),), partial(_summarise_doctor, kind)),
        Step("classes", ((*find_classes, *map(str, class_models)),), summarise_classes),
        Step(
            "verify",
            ((*prepare, "lowbit", "demo"), (*verify, *demo, "--methods", _DEMO_METHODS)),
            summarise_verify,
        ),
        Step(
            "verify-layerskip",
            (
                (*prepare, "layerskip", "demo", "--exit", "4"),
                (*verify, *demo, "--methods", "layerskip,layerskip+suffix"),
            ),
            summarise_verify,
        ),
        Step("parity", (parity,), summarise_tests),
        Step("bench", ((*bench, *demo),), _summarise_bench),
    ]
    if kind in ("cuda", "vulkan"):  # the tests need a GPU with its own memory
        # -rs prints why tests are skipped.
        gpu_tests = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu")
        steps.insert(1, Step("gpu-tests", (gpu_tests,), summarise_tests))
    if target:
        steps.append(Step("classes-given", ((*find_classes, str(target)),), summarise_classes))
        steps.append(Step("verify-given", ((*verify, *models),), summarise_verify))
        steps.append(Step("bench-given", ((*bench, *models),), _summarise_bench))
    if not target:
        target, draft = _MODELS / "demo-target-q8_0.gguf", _MODELS / "demo-draft-q8_0.gguf"
    if target.is_file():  # only the GGUF backend splits a model between the GPU and the CPU
        steps += [
            create_plan_step(kind, share, str(target), str(draft or "none")) for share in ("all", "half", "0")
        ]
    return steps


def create_plan_step(kind: str, share: str, target: str, draft: str) -> Step:
    """Return the comparison of the planned with the measured memory of a model."""
    measure = ("-m", "scripts.gpu_checking.measure_memory", target, draft, share, kind)
    method = "none" if draft == "none" else "model"
    plan = ("-m", "edgespec", "plan", "--json", "--target", target, "--draft", draft, "--method", method)
    # `run_step` replaces {gpu_layers} by the number that the first command prints.
    more = ("--prefix-cache", "none", "--exactness", "off", "--reserve-full-context", "{gpu_layers}")
    return Step(f"plan-{share}", (measure, (*plan, *more)), partial(summarise_plan, kind))


def run_step(
    step: Step, label: str, python: str, folder: Path, environment: Mapping[str, str], limit_seconds: float
) -> Result:
    """Run the commands of a step, and print a progress line.

    Args:
        step: The step.
        label: Text for the progress line.
        python: The Python that has edgespec's requirements.
        folder: Folder for the output of the commands.
        environment: Environment variables of the commands.
        limit_seconds: Time limit for the whole step.
    """
    started = time.monotonic()
    outputs: list[str] = []
    tail, failure = "", ""
    for number, command in enumerate(step.commands):
        arguments = [part for text in command for part in _fill(text, outputs)]
        path, log = (folder / f"{step.name}-{number}.{suffix}" for suffix in ("out", "log"))
        with path.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(
                [python, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
            try:
                status = _wait(process, label, started, limit_seconds)
            finally:
                with suppress(ProcessLookupError, PermissionError):  # may have child processes
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outputs.append(path.read_text("utf-8", "replace"))
        tail = outputs[-1] + log.read_text("utf-8", "replace")
        if status is None:
            failure = f"stopped after the time limit of {limit_seconds / 60:g} minutes"
        elif status:
            failure = f"exit status {status}"
        if failure:
            break
    figures: dict[str, str] = {}
    try:
        figures, problem = step.summarise(outputs)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        problem = f"the output cannot be read: {error!r}"
    problem = failure or problem
    seconds = round(time.monotonic() - started, 1)
    lines = [line[:_LINE_LENGTH] for line in tail.splitlines()[-_LAST_LINES:]] if problem else []
    lines = [line.replace(str(ROOT), ".").replace(str(Path.home()), "~") for line in lines]
    return Result(step.name, "failed" if problem else "passed", seconds, figures, problem, lines)


def _fill(text: str, outputs: list[str]) -> list[str]:
    """Return an argument of a command, inserting the number that the last command printed."""
    if text != "{gpu_layers}":
        return [text]
    layers = json.loads(outputs[-1])["gpu_layers"]
    return [] if layers is None else ["--gpu-layers", str(layers)]


def _wait(process: subprocess.Popen[bytes], label: str, started: float, limit_seconds: float) -> int | None:
    """Wait for a process, and return its exit status, or None if it exceeded the time limit."""
    while (elapsed := time.monotonic() - started) < limit_seconds:
        if sys.stderr.isatty():
            print(
                f"\r{label} {int(elapsed) // 60}:{int(elapsed) % 60:02} ", end="", file=sys.stderr, flush=True
            )
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=min(1.0, limit_seconds - elapsed))
    return None


def _summarise_doctor(kind: str, outputs: list[str]) -> Summary:
    report = json.loads(outputs[-1])
    checks = {check["name"]: check["finding"] for check in report["checks"]}
    names = ("processor", "memory", "gpu", "mlx", "smollm2", "demo")
    figures = {name: checks[name] for name in names if name in checks}
    missing = kind != "cpu" and not report["machine"]["llama_cpp"]["gpu_offload"]
    return figures, "llama-cpp-python was built without GPU support; use --wheels" if missing else ""


def summarise_classes(outputs: list[str]) -> Summary:
    """Summarise the classes of pass widths that agree bit for bit, for each model and set of load options."""
    figures = {}
    for model in json.loads(outputs[-1])["models"]:
        figures[model["model"]] = model["chosen"]
        for configuration in model["configurations"]:
            classes = "; ".join(map(_describe_class, configuration["classes"])) or "none"
            figures[f"{model['model']}, {configuration['options']}"] = classes
    return figures, ""


def _describe_class(found: dict[str, object]) -> str:
    parts = [f"passes of {found['widths']} tokens agree"]
    parts += ["trees too"] if found["trees"] else ["trees do not"]
    block = found["block_tokens"]
    parts += ["prompts may be split anywhere" if block == 1 else f"prompts in blocks of {block} tokens"]
    parts += [] if found["any_threads"] else ["the number of CPU threads must not change"]
    return ", ".join(parts)


def summarise_verify(outputs: list[str]) -> Summary:
    """Summarise the output of `edgespec verify --json`, whose exit status says whether it passed."""
    figures = {}
    for name, counts in json.loads(outputs[-1])["methods"].items():
        drafted = f"{counts['accepted_tokens']} of {counts['drafted_tokens']} drafted tokens accepted"
        largest = counts["largest_difference"]
        size = "" if largest is None else f" (up to {largest:.3g} logits)"
        found = f"{counts['rounding']} differ by rounding{size}, {counts['faults']} faults"
        figures[name] = f"{counts['identical']} of {counts['prompts']} prompts identical, {found}; {drafted}"
    return figures, ""


def summarise_tests(outputs: list[str]) -> Summary:
    """Return the last line of pytest's output, and an error if none passed. Skipped tests check nothing."""
    counts = outputs[-1].splitlines()[-1].strip("= ")
    return {"tests": counts}, "" if re.search(r"\b\d+ passed\b", counts) else f"no test passed ({counts})"


def _summarise_bench(outputs: list[str]) -> Summary:
    report = json.loads(outputs[-1])
    figures = {
        "replies": f"{report['replies']}, of which {report['differing_replies']} differ from plain decoding"
    }
    for figure in report["figures"]:
        method = figure["config"]["method"]
        if figure["category"] is None and not figure["config"]["again"] and figure["replies"]:
            speed = figure["tokens_per_second"] or 0.0
            name = f"{method} at temperature {figure['temperature']:g}"
            speed_up = "" if method == "none" else f"speed-up {figure['speed_up']:.2f}x, "
            figures[name] = f"{speed_up}{speed:.0f} tokens/s"
    return figures, ""


def summarise_plan(kind: str, outputs: list[str]) -> Summary:
    """Compare planned with measured memory, which is that of the cards for CUDA and Vulkan."""
    measured, layers = (json.loads(outputs[0])[name] for name in ("measured_bytes", "gpu_layers"))
    planned = sum(
        item["bytes"]
        for item in json.loads(outputs[1])["items"]
        if _is_measured(kind, layers, item.get("pool", "memory"), item["kind"])
    )
    figures = {
        "GPU layers": "all" if layers is None else str(layers),
        "planned": f"{planned / _MIB:,.1f} MiB",
        "measured": f"{measured / _MIB:,.1f} MiB",
    }
    is_near = abs(planned - measured) <= max(_NEAR_SHARE * measured, _NEAR_BYTES)
    return figures, "" if is_near else "planned and measured memory differ by more than 3% and 64 MiB"


def _is_measured(api: str, gpu_layers: int | None, pool: str, item_kind: str) -> bool:
    """Return whether the memory of an item of a plan is part of the measured memory."""
    if api not in ("cuda", "vulkan"):
        return pool == "memory" and item_kind not in ("process", "headroom")
    # Vulkan's log also contains the main memory through which the CPU exchanges data with the GPU.
    is_on_gpu = pool == "gpu" and item_kind != "unusable"
    return is_on_gpu or (api == "vulkan" and gpu_layers != 0 and item_kind == "compute")
