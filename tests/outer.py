"""Run `starwheel` as a user does, in processes of its own, with the scripted engine and trainer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import small

from configs.load import show
from tasks.history import manifest_of, read_history

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from configs.run import RunConfig
    from storage.store import Store

STARWHEEL = (sys.executable, "-m", "flows.cli")
MARK = "STARWHEEL_TEST_MARK"  # in the environment of everything that a test started
SHAPE = {
    "model_type": "scripted",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 4096,
}


def described(folder: Path, **changes: Any) -> RunConfig:
    """Describe a short run whose base also has the shape that the memory check reads."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {"iterations": 1, "bootstrap": None, **changes}
    if changes["bootstrap"] is None:
        changes["split"] = {"bootstrap": 0}
    config = small.config(folder, **changes)
    (folder / "base" / "config.json").write_text(json.dumps(SHAPE))
    return config


def config_file(folder: Path, **changes: Any) -> Path:
    """Write the description as the YAML file that a user gives."""
    file = folder / "run.yaml"
    file.write_text(show(described(folder, **changes)))
    return file


def results(store: Store, run_id: str) -> dict[tuple[int, str, str], Any]:
    """Give what each used step made: its key, the digest of every artifact, the model."""
    made = {}
    for used in read_history(store, run_id).used:
        manifest = manifest_of(store, used)
        assert manifest is not None, used
        digests = {name: one.digest for name, one in manifest.artifacts.items()}
        made[used.iteration, used.step, used.label] = (used.key, digests, manifest.facts.get("model"))
    return made


@dataclass
class Session:
    """One user's terminal: a home, an environment, and processes that all carry the session's mark."""

    folder: Path
    changes: Mapping[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def environment(self) -> dict[str, str]:
        own = {"HOME": str(self.home), MARK: self.mark, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "XDG_"))}
        return {**kept, **own, **self.changes}

    def start(self, *command: str, log: str = "out", cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a command as a terminal does: a process group of its own where Ctrl-C works."""
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{log}.out").open("wb") as out, (self.folder / f"{log}.err").open("wb") as err:
            return subprocess.Popen(
                command,
                env=self.environment,
                cwd=cwd or self.home,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
            )

    def call(self, *command: str, log: str = "out", cwd: Path | None = None, seconds: float = 400) -> str:
        """Run a command to its end, which must be good; give its output."""
        code = self.start(*command, log=log, cwd=cwd).wait(seconds)
        assert code == 0, self.told(log) + (self.folder / f"{log}.out").read_text()
        return (self.folder / f"{log}.out").read_text()

    def told(self, log: str = "out") -> str:
        """Give what a command wrote to stderr."""
        return (self.folder / f"{log}.err").read_text()

    def processes(self) -> list[psutil.Process]:
        """Find all that lives of this session, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def left_over(self, seconds: float = 60) -> list[str]:
        """Wait for the session's processes to end; give the command lines of those that stay."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        told = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                told.append(command_line(process))
        return told

    def end(self) -> None:
        """End what a failed test left."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def log_records(store: Path, run_id: str) -> list[dict[str, Any]]:
    """Read a run's log as it lies there, while someone writes it."""
    return [json.loads(path.read_text()) for path in sorted((store / "runs" / run_id / "log").glob("*.json"))]


def steps_logged(store: Path, run_id: str) -> list[tuple[int, str]]:
    """Give (iteration, step) of all that the run's log names."""
    return [(one["iteration"], one["step"]) for one in log_records(store, run_id) if one["kind"] == "step"]


def wait_until(process: subprocess.Popen[bytes], seen: Callable[[], Any], what: str, seconds: float = 400) -> Any:
    """Look every hundredth of a second until something is there, while the process still runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := seen():
            return found
        assert process.poll() is None, f"ended with {process.returncode} before {what}"
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come in {seconds} s")


def command_line(process: psutil.Process) -> str:
    """Give the command of a process, nothing where it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
