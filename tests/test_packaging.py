"""All installed packages are pinned, and shipped files do not reveal the machine they were made on."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from edgespec.system.installation import BUILD_FLAGS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BASH = "#!/usr/bin/env bash\n"
KINDS = ["runtime", "mlx", "dev"]
SCRIPTS = sorted(
    path
    for path in (ROOT / "scripts").iterdir()
    if path.is_file() and path.read_bytes().startswith(BASH.encode())
)


def pinned(kind: str) -> dict[str, str]:
    """Return package names (normalised) with the pinned versions and hashes."""
    text = (ROOT / "requirements" / f"{kind}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {re.split(r"==", line)[0].lower().replace("_", "-"): line for line in lines}


@pytest.mark.parametrize("kind", [*KINDS, "browser"])
def test_every_package_is_pinned_by_hash_and_no_host_is_named(kind: str) -> None:
    for name, line in pinned(kind).items():
        assert re.match(r"[a-z0-9-]+==[^ ]+ .*--hash=sha256:[0-9a-f]{64}", line), name
        assert "://" not in line
        assert "index-url" not in line
        assert "file:" not in line
        assert not line.startswith("edgespec")


@pytest.mark.parametrize("kind", ["smollm2", "real-models"])
def test_models_are_pinned_by_hash_and_no_host_is_named(kind: str) -> None:
    text = (ROOT / "requirements" / f"{kind}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pin = re.compile(r"[a-z0-9-]+==[^ ]+ +--hash=sha256:[0-9a-f]{64}")
    assert all(line == "-r smollm2.txt" or pin.fullmatch(line) for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pins_hold_every_dependency(kind: str) -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = list(PROJECT["dependencies"])
    if kind in ("mlx", "dev"):
        wanted += extras["mlx"]
    if kind == "dev":
        assert extras["dev"][0] == "edgespec[mlx,plots]", "tests of MLX and of plots run everywhere"
        wanted += [*extras["plots"], *extras["dev"][1:]]
    names = {re.split(r"[<>=\[; ]", dependency)[0].lower().replace("_", "-") for dependency in wanted}
    assert names <= pinned(kind).keys()


def test_mlx_is_the_rule_on_apple_silicon_and_an_extra_on_linux() -> None:
    runtime, mlx = pinned("runtime"), pinned("mlx")
    apple = "platform_machine == 'arm64' and sys_platform == 'darwin'"
    for name in ("mlx", "mlx-lm", "mlx-metal", "transformers"):
        assert f"; {apple} " in runtime[name]
        assert apple in mlx[name]
    assert "mlx-cpu" not in runtime
    assert "; sys_platform == 'linux' " in mlx["mlx-cpu"]
    assert "torch" not in mlx


def test_tests_run_on_the_versions_users_get() -> None:
    def files(kind: str) -> dict[str, str]:
        # Platform markers may differ, because the extra installs some packages on more platforms.
        return {name: re.sub(r" ;.*?(?= +--hash)", "", line) for name, line in pinned(kind).items()}

    runtime, mlx, dev = files("runtime"), files("mlx"), files("dev")
    assert runtime.items() <= mlx.items()
    assert mlx.items() <= dev.items()


def test_what_the_code_reads_is_shipped_with_it() -> None:
    """The build includes these folders except ignored files, and the code reads no other files."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert wheel["targets"]["wheel"]["only-include"] == ["edgespec", "models"]
    data = [path for path in (ROOT / "edgespec").rglob("*.*") if path.suffix not in (".py", ".pyc")]
    assert ROOT / "edgespec" / "bench" / "prompts.jsonl" in data
    if (ROOT / ".git").exists():
        said = subprocess.run(["git", "check-ignore", *data], cwd=ROOT, capture_output=True, check=False)
        assert said.stdout == b""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_that_parses_and_may_be_run(script: Path) -> None:
    assert script.read_text(encoding="utf-8").startswith(BASH + "# "), "the first line says what it is for"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_no_advice_installs_another_projects_package() -> None:
    """edgespec is in no package index, so `pip install edgespec` would install an unrelated package."""
    texts = [*ROOT.glob("edgespec/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    for file in texts:
        text = file.read_text(encoding="utf-8")
        # llama-cpp-python is the only package that users may have to build.
        install = r"\b(pip3?|uv tool|pipx|conda)\s+install\b(?!.* llama-cpp-python==)"
        assert not re.search(install, text), file


def test_the_documentation_builds_the_pinned_version_with_the_flags_of_scripts_setup() -> None:
    pins = (ROOT / "requirements" / "runtime.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^llama-cpp-python==(\S+)", pins, re.MULTILINE)
    texts = [file.read_text(encoding="utf-8") for file in [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]]
    commands = re.findall(r"^.*pip install .*llama-cpp-python.*$", "\n".join(texts), re.MULTILINE)
    assert len(commands) >= 4  # in docs/gpu.md and docs/exactness.md
    for command in commands:
        assert f'CMAKE_ARGS="{BUILD_FLAGS}' in command
        assert command.endswith(f" llama-cpp-python=={version}")


def test_scripts_setup_reads_the_flags_of_the_build() -> None:
    text = (ROOT / "scripts" / "setup").read_text(encoding="utf-8")
    (line,) = re.findall(r"^flags=.*$", text, re.MULTILINE)
    done = subprocess.run(["bash", "-c", f'{line}; echo "$flags"'], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.decode().strip() == BUILD_FLAGS
