"""What a training is made of, without torch: order, batches, refusals, resumable state, the scripted trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from training_rows import request, settings, sft_rows

from configs.run import LoraConfig
from storage.errors import StepFailedError
from storage.schema import SCHEMAS
from tasks.training import scripted
from tasks.training.order import Batches, cut_batches, deal, digest_rows, merge_seen, row_order
from tasks.training.request import ModelFolder, check_request
from tasks.training.resume import MARKER, TrainerState

if TYPE_CHECKING:
    import pyarrow as pa

LENGTHS = np.arange(21) % 5 + 3


def test_every_epoch_sees_every_row_once() -> None:
    order = row_order(LENGTHS, cut_batches(settings(epochs=3, batch_size=7), 21), seed=1)
    assert len(order) == 63
    assert sorted(order.tolist()) == sorted(list(range(21)) * 3)
    assert sorted(order[:21].tolist()) == list(range(21)), "7 divides 21, so no step spans two epochs"


def test_rows_of_a_step_depend_on_the_seed_alone_and_stand_by_length() -> None:
    batches = Batches(total=42, batch=8, micro=4, accumulation=2)
    order, again = (row_order(LENGTHS, batches, seed=1) for _ in range(2))
    assert order.tolist() == again.tolist()
    assert order.tolist() != row_order(LENGTHS, batches, seed=2).tolist()
    other = row_order(np.ones(21, dtype=np.int64), batches, seed=1)
    for first in range(0, 42, 8):
        assert sorted(order[first : first + 8]) == sorted(other[first : first + 8])
        lengths = LENGTHS[order[first : first + 8]]
        assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)


@pytest.mark.parametrize(
    ("changes", "rows", "wanted"),
    [
        ({"batch_size": 32, "per_device_batch": 8}, 100, (200, 32, 8, 4)),
        ({"batch_size": 12, "per_device_batch": 8}, 100, (200, 12, 6, 2)),
        ({"batch_size": 7, "per_device_batch": 4}, 100, (200, 7, 1, 7)),
        ({"batch_size": 32, "per_device_batch": 64}, 10, (20, 10, 10, 1)),
        ({"max_steps": 5}, 10, (40, 8, 4, 2)),
        ({"epochs": 0.5}, 21, (10, 8, 4, 2)),
        ({"epochs": 0.01}, 21, (1, 8, 4, 2)),
    ],
)
def test_batches_fit(changes: dict[str, int], rows: int, wanted: tuple[int, ...]) -> None:
    batches = cut_batches(settings(**changes), rows)
    assert (batches.total, batches.batch, batches.micro, batches.accumulation) == wanted
    assert batches.micro * batches.accumulation == batches.batch


def test_processes_share_the_batch_or_it_is_refused() -> None:
    assert cut_batches(settings(batch_size=32, per_device_batch=8), 100, processes=2).accumulation == 2
    with pytest.raises(StepFailedError, match="multiple of 3"):
        cut_batches(settings(batch_size=32), 100, processes=3)


@pytest.mark.parametrize("rows", [1, 3, 8, 17, 21])
@pytest.mark.parametrize(("batch", "part", "processes"), [(8, 2, 2), (8, 8, 1), (6, 2, 3), (8, 1, 4)])
def test_processes_share_every_step_without_repeating_a_row(rows: int, batch: int, part: int, processes: int) -> None:
    """The libraries would repeat rows to make the last step even."""
    config = settings(batch_size=batch, per_device_batch=part, epochs=1)
    batches = cut_batches(config, rows, processes=processes)
    assert (batches.total, batches.batch, batches.steps) == (rows, min(batch, rows), -(-rows // batch))
    for step in range(batches.steps):
        dealt = deal(batches, step, processes=processes)
        assert len(dealt) == processes
        assert len({len(parts) for parts in dealt}) == 1, "processes keep step with each other"
        assert all(len(one) <= batches.micro for parts in dealt for one in parts)
        here = sorted(position for parts in dealt for one in parts for position in one)
        assert here == list(range(step * batches.batch, min((step + 1) * batches.batch, rows)))
        seen = [[100 + position for one in parts for position in one] for parts in dealt]
        assert merge_seen(dealt, seen) == [100 + position for position in here]
    assert len(deal(batches, 0, processes=processes)[0]) <= batches.accumulation


def test_rows_that_were_not_dealt_are_seen() -> None:
    dealt = deal(Batches(total=5, batch=5, micro=2, accumulation=2), 0, processes=2)
    assert sorted(merge_seen(dealt, [[1, 2, 3, 4], [5]])) == [1, 2, 3, 4, 5]
    assert len(merge_seen(dealt, [[1, 2, 3, 3], [4, 5]])) == 6


def test_last_step_is_shorter_and_steps_are_counted() -> None:
    batches = cut_batches(settings(), 21)
    assert (batches.total, batches.steps) == (42, 6)
    assert len(row_order(LENGTHS, batches, seed=0)[5 * 8 :]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": sft_rows(0)}, "no sft rows"),
        ({"method": "star-dpo", "rows": sft_rows(2)}, "lack the columns chosen"),
        ({"method": "star-dpo", "reference": None}, "needs a reference"),
        ({"config": settings(learning_rate=1e-6)}, "train.learning_rate: 1e-06 moves all weights"),
        ({"config": settings(lora=None), "start": ModelFolder(Path("b"), Path("a"))}, "never merged"),
    ],
)
def test_what_cannot_be_trained_is_refused_first(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(StepFailedError, match=message):
        check_request(request(tmp_path, tmp_path, **changes))


def _checkpoint(state: TrainerState, step: int) -> Path:
    folder = state.folder / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "weights").write_text(str(step))
    (folder / "state.json").write_text("{}")
    return folder


def test_a_half_written_checkpoint_is_not_resumed_but_the_one_before(tmp_path: Path) -> None:
    """Traps 6: half-written checkpoint loaded by auto-resume."""
    state = TrainerState.open(tmp_path, "token", keep=True)
    _checkpoint(state, 9)
    state.complete(9)
    _checkpoint(state, 10)
    assert state.latest() == state.folder / "checkpoint-9"
    assert not (state.folder / "checkpoint-10").exists(), "it can't be mistaken for a whole one later"


@pytest.mark.parametrize("damage", ["change", "remove", "add", "token", "marker"])
def test_a_damaged_checkpoint_is_not_resumed(tmp_path: Path, damage: str) -> None:
    state = TrainerState.open(tmp_path, "token", keep=True)
    folder = _checkpoint(state, 4)
    state.complete(4)
    assert state.latest() == folder
    if damage == "change":
        (folder / "weights").write_text("5")
    elif damage == "remove":
        (folder / "state.json").unlink()
    elif damage == "add":
        (folder / "optimizer.pt").write_bytes(b"planted")
    elif damage == "token":
        state = TrainerState(state.folder, "another")
    else:
        (folder / MARKER).write_text("{")
    assert state.latest() is None


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    state = TrainerState.open(tmp_path, "token", keep=True)
    for step in (9, 10, 11):
        _checkpoint(state, step)
        state.complete(step)
    assert sorted(path.name for path in state.folder.iterdir()) == ["checkpoint-10", "checkpoint-11"]


def test_state_of_another_training_is_removed(tmp_path: Path) -> None:
    """Traps 5: trainer state is resumed only for the same rows and start."""
    first = TrainerState.open(tmp_path, "one", keep=True)
    _checkpoint(first, 3)
    first.complete(3)
    assert TrainerState.open(tmp_path, "one", keep=True).latest() is not None
    second = TrainerState.open(tmp_path, "two", keep=True)
    assert second.latest() is None
    assert not first.folder.exists()


def test_resume_off_starts_from_nothing(tmp_path: Path) -> None:
    state = TrainerState.open(tmp_path, "one", keep=True)
    _checkpoint(state, 3)
    state.complete(3)
    assert TrainerState.open(tmp_path, "one", keep=False).latest() is None


def _scripted(tmp_path: Path, name: str = "x", **changes: object) -> tuple[bytes, pa.Table, pa.Table]:
    base = tmp_path / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text("{}")
    result = scripted.train(request(base, tmp_path / name, **changes))
    assert (result.folder / "adapter_config.json").is_file()
    return (result.folder / "adapter_model.safetensors").read_bytes(), result.train_log, result.probes


def test_scripted_trainer_repeats_itself_and_follows_its_inputs(tmp_path: Path) -> None:
    weights, log, probes = _scripted(tmp_path)
    assert _scripted(tmp_path, "y")[0] == weights
    assert log.schema == SCHEMAS["train_log"]
    assert log.num_rows == 6
    assert probes.schema == SCHEMAS["probes"]
    assert probes.num_rows == 21
    others = [{"rows": sft_rows(20)}, {"seed": 4}, {"config": settings(epochs=1)}]
    assert weights not in [_scripted(tmp_path, "z", **other)[0] for other in others]
    elsewhere = settings(per_device_batch=2)  # not in the key
    assert _scripted(tmp_path, "z", config=elsewhere)[0] == weights
    (tmp_path / "base" / "model.safetensors").write_bytes(b"other")
    start = ModelFolder(tmp_path / "base", tmp_path / "x" / "out")
    assert _scripted(tmp_path, "z", start=start)[0] != weights


def test_scripted_log_names_the_rows_of_each_step(tmp_path: Path) -> None:
    _, log, _ = _scripted(tmp_path)
    order = row_order(np.zeros(21, dtype=np.int64), cut_batches(settings(), 21), seed=3)
    assert log["rows"][0].as_py() == digest_rows(order[:8].tolist())
    assert log["epoch"][5].as_py() == 2.0


def test_scripted_training_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, json; from tasks.training import scripted, request, order, resume; import safetensors.numpy; "
        "print(json.dumps(sorted({'torch','transformers','trl','peft','datasets'} & set(sys.modules))))"
    )
    root = Path(__file__).parents[1]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == []


def test_lora_rate_is_free_for_all_weights(tmp_path: Path) -> None:
    check_request(request(tmp_path, tmp_path, config=settings(lora=None, learning_rate=1e-6)))
    check_request(request(tmp_path, tmp_path, config=settings(lora=LoraConfig(), learning_rate=1e-5)))
