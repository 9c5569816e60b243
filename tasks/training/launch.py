"""Train in several processes of this machine: started by `accelerate launch`, listened to, ended with this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.run import TrainConfig
from storage import errors
from storage.errors import StepFailedError, TransientError
from storage.tables import read_table, write_table
from tasks.training.request import ModelFolder, TrainRequest, TrainResult
from tasks.training.weights import fresh, on_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT = Path(__file__).absolute().parents[2]  # a job's folder of our packages: `resolve` would lead out of it
FSDP = ROOT / "configs" / "accelerate" / "fsdp.yaml"
LIFELINE, ASKED, EVENTS, FACTS = "lifeline", "request.json", "events.jsonl", "facts.json"
_MODELS = ("start", "reference")
TABLES = ("train_log", "probes")
LOOK_SECONDS = 0.1
GRACE_SECONDS = 3.0


def train_together(request: TrainRequest, resumed: Path | None) -> TrainResult:
    """Train in `train.processes` processes; raises what one of them raised, TransientError where one just died."""
    place = request.work.absolute() / "ranks"
    fresh(place)
    _write_request(request, resumed, place)
    with _started(request.config, place) as process:
        _listen(process, place, request.progress)
    if process.returncode:
        raise failure(place, request.config.processes, process.returncode)
    log, probes = (read_table(place / f"{name}.parquet", name) for name in TABLES)
    return TrainResult(request.out, log, probes, json.loads((place / FACTS).read_text()))


def command(config: TrainConfig, place: Path, *, cuda: bool) -> list[str]:
    """Spell the command that starts the processes.

    All weights are trained in shards (FSDP), an adapter on a copy of its base each. `accelerate launch` itself hands
    over to torch's launcher, and on CPUs starts one process only; there torch's launcher is asked right away.
    """
    many, what = str(config.processes), ["-m", "tasks.training.rank", str(place)]
    if not cuda:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", many, *what]
    how = ["--multi_gpu", "--mixed_precision", "bf16"] if config.lora else ["--config_file", str(FSDP)]
    start = ["-m", "accelerate.commands.launch", *how, "--num_processes", many, "--main_process_port", "0"]
    return [sys.executable, *start, *what]


@contextmanager
def _started(config: TrainConfig, place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the processes; none is left when the block is left, nor when this process is killed.

    The launchers put each into a session of its own, where no signal to this group arrives, and hand no descriptor
    down. So they hold on to a named pipe: it ends with this process, and they end with it.
    """
    os.mkfifo(place / LIFELINE)
    lifeline = os.open(place / LIFELINE, os.O_RDWR)  # not inherited; read and write, so that opening doesn't wait
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command(config, place, cuda=on_cuda()), cwd=ROOT, env=environment)
    try:
        yield process
    finally:
        os.close(lifeline)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _listen(process: subprocess.Popen[bytes], place: Path, progress: Callable[[Mapping[str, Any]], None]) -> None:
    """Pass on what rank 0 tells until the launcher has ended."""
    (place / EVENTS).touch()
    with open(place / EVENTS) as events:
        line, ended = "", False
        while True:
            line += events.readline()
            if line.endswith("\n"):
                progress(json.loads(line))
                line = ""
            elif ended:
                return
            elif process.poll() is None:
                time.sleep(LOOK_SECONDS)
            else:
                ended = True  # one more look: it may have told something right before


def failure(place: Path, processes: int, code: int) -> errors.StarwheelError:
    """Give what ended a training together: the first error that is no echo of another rank's.

    Where some rank said nothing at all, and the others only noticed, it was killed: TransientError.
    """
    told = [json.loads(file.read_text()) for file in sorted(place.glob("error-*.json"))]
    own = [one for one in told if not one["lost"]]
    if not own and len(told) < processes:
        return TransientError(f"train: one of the processes that train together ended without a word (code {code})")
    first = (own or told)[0]
    kind: type[errors.StarwheelError] = getattr(errors, first["kind"], StepFailedError)
    return kind(first["message"])


def _write_request(request: TrainRequest, resumed: Path | None, place: Path) -> None:
    write_table(place / "rows.parquet", request.rows, request.artifact)
    models = {name: _folder_json(getattr(request, name)) for name in _MODELS}
    same = {name: getattr(request, name) for name in ("method", "max_len", "seed", "token")}
    paths = {name: str(getattr(request, name).absolute()) for name in ("work", "out")}
    asked = {
        **same,
        **paths,
        **models,
        "config": request.config.model_dump(mode="json"),
        "template_kwargs": dict(request.template_kwargs),
        "resumed": str(resumed.absolute()) if resumed else None,
    }
    (place / ASKED).write_text(json.dumps(asked))


def read_request(place: Path, progress: Callable[[Mapping[str, Any]], None]) -> tuple[TrainRequest, Path | None]:
    """Read what the processes are asked, and the checkpoint that they go on from."""
    asked = json.loads((place / ASKED).read_text())
    resumed = asked.pop("resumed")
    models = {name: asked[name] and ModelFolder(*(one and Path(one) for one in asked[name])) for name in _MODELS}
    paths = {name: Path(asked[name]) for name in ("work", "out")}
    config = TrainConfig.model_validate(asked["config"])
    artifact = "dpo" if models["reference"] else "sft"
    rows = read_table(place / "rows.parquet", artifact)
    given = {**asked, **models, **paths, "config": config, "rows": rows, "progress": progress}
    return TrainRequest(**given), Path(resumed) if resumed else None


def _folder_json(model: ModelFolder | None) -> list[str | None] | None:
    if model is None:
        return None
    return [str(model.base.absolute()), str(model.adapter.absolute()) if model.adapter else None]
