"""Helper that runs a script as a user would and reads its JSON output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).parents[2] / "scripts"


def run_script(script: str, *options: str) -> dict[str, Any]:
    """Run a script, check that it succeeds, and return the JSON object that it prints."""
    command = [sys.executable, str(_SCRIPTS / script), *options]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    results = json.loads(completed.stdout)
    assert isinstance(results, dict)
    return results
