"""Trainings in two processes (gloo, on the CPU): as one process trains, and none is left when the parent is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tiny_model import tiny_model
from training_rows import dpo_rows, request, settings, sft_rows

from storage.errors import StepFailedError, TransientError
from tasks.training.launch import ROOT, command, failure
from tasks.training.trainer import train

if TYPE_CHECKING:
    from tasks.training.request import TrainResult

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(("method", "part", "count"), [("star-sft", 2, 17), ("star-dpo", 4, 19)])
def test_two_processes_train_as_one(base: Path, tmp_path: Path, method: str, part: int, count: int) -> None:
    """An adapter by SFT, all weights by DPO; of the last step a process has nothing, or fewer rows than the other."""
    own: dict[str, Any] = {} if method == "star-sft" else {"lora": None, "learning_rate": 1e-3}
    rows = sft_rows(count) if method == "star-sft" else dpo_rows(count)
    told: list[int] = []

    def trained(processes: int) -> TrainResult:
        config = settings(epochs=1, per_device_batch=part, processes=processes, save_every=2, **own)
        place = tmp_path / str(processes)
        asked = request(base, place, method=method, rows=rows, config=config)
        heard = told if processes == 2 else []
        return train(replace(asked, progress=lambda numbers: heard.append(numbers["train_step"])))

    one, two = trained(1), trained(2)
    for column in ("train_step", "epoch", "rows", "learning_rate"):
        assert one.train_log[column].to_pylist() == two.train_log[column].to_pylist()
    assert two.train_log["loss"].to_pylist() == pytest.approx(one.train_log["loss"].to_pylist(), abs=1e-4)
    assert two.train_log["grad_norm"].to_pylist() == pytest.approx(one.train_log["grad_norm"].to_pylist(), rel=1e-3)
    for fact in ("train_steps", "rows_seen", "loss_tokens_seen", "batch"):
        assert one.facts[fact] == two.facts[fact]
    assert (one.facts["processes"], two.facts["processes"]) == (1, 2)
    assert two.facts["accumulation"] * two.facts["micro_batch"] * 2 == 8
    assert told == [1, 2, 3]
    for alone, together in zip(one.probes.to_pylist(), two.probes.to_pylist(), strict=True):
        assert together["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-2)
        assert together["ids"] == alone["ids"]
    assert {path.name for path in two.folder.iterdir()} == {path.name for path in one.folder.iterdir()}
    (state,) = (tmp_path / "2" / "work" / "trainer").iterdir()
    assert (state / "checkpoint-2" / "complete.json").is_file()


def test_what_a_process_met_is_what_is_raised(tmp_path: Path) -> None:
    told = {"kind": "StepFailedError", "message": "train: the loss of train step 2 is nan", "lost": False}
    (tmp_path / "error-1.json").write_text(json.dumps(told))
    echo = {"kind": "StepFailedError", "message": "RuntimeError: Connection closed by peer", "lost": True}
    (tmp_path / "error-0.json").write_text(json.dumps(echo))
    met = failure(tmp_path, 2, 1)
    assert type(met) is StepFailedError
    assert str(met) == told["message"]
    (tmp_path / "error-1.json").unlink()
    assert type(failure(tmp_path, 2, -9)) is TransientError, "rank 1 was killed, rank 0 only noticed"
    (tmp_path / "error-0.json").unlink()
    assert type(failure(tmp_path, 2, -9)) is TransientError


PARENT = """
import signal, sys, time
from pathlib import Path
from tasks.training import launch
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
def command(config, place, *, cuda):
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *how, sys.argv[2], str(place)]
launch.command = command
with launch._started(None, Path(sys.argv[1])):
    time.sleep(600)
"""
RANK = """
import os, sys, time
from pathlib import Path
from tasks.jobs.lifeline import die_with_owner
place = Path(sys.argv[1])
die_with_owner(place / "lifeline")
(place / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_is_left_when_the_job_is_gone(tmp_path: Path, sign: signal.Signals) -> None:
    """Torch's launcher gives each a session of its own, which no signal to the job's group reaches."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    job = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), str(script)], cwd=ROOT, env=environment)
    try:
        pids = [int(_written(tmp_path / f"pid-{rank}", job)) for rank in range(2)]
        assert {os.getpgid(pid) for pid in pids} == set(pids), "else nothing is tested here"
        started = [psutil.Process(pid) for pid in pids]
    finally:
        job.send_signal(sign)
        job.wait(120)
    _, alive = psutil.wait_procs(started, timeout=120)
    assert not alive


def _written(file: Path, job: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline and job.poll() is None:
        if file.is_file() and file.read_text():
            return file.read_text()
        time.sleep(0.1)
    raise AssertionError(f"{file.name} was not written")


def test_accelerate_reads_the_command_and_the_shards_that_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: the command is read by accelerate's own parser, its settings by its own plugin."""
    from accelerate.commands.launch import _validate_launch_command as validate
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    asked = command(settings(lora=None, processes=4), Path("/place"), cuda=True)
    assert asked[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    arguments, _, _ = validate(launch_command_parser().parse_args(asked[3:]))
    assert (arguments.use_fsdp, arguments.num_processes, arguments.mixed_precision) == (True, 4, "bf16")
    assert (arguments.module, arguments.training_script, arguments.training_script_args) == (
        True,
        "tasks.training.rank",
        ["/place"],
    )
    for name, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)

    adapter = command(settings(processes=2), Path("/place"), cuda=True)
    arguments, _, _ = validate(launch_command_parser().parse_args(adapter[3:]))
    assert (arguments.use_fsdp, arguments.multi_gpu, arguments.num_processes) == (False, True, 2)
