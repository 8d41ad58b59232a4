"""Runs a script as a person would, and reads what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).parents[2] / "scripts"


def found_by(script: str, *options: str) -> dict[str, Any]:
    """The JSON object that a script of this name prints; it must succeed."""
    command = [sys.executable, str(_SCRIPTS / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found
