"""`make bench` starts: it is run by nobody else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_thousand_judgments_are_timed_outside_of_pytest() -> None:
    code = "import json; from tests.bench import judgments; print(json.dumps(judgments(1000)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() >= {"judge", "select", "sft_rows", "select_sides", "dpo_rows"}
