"""Real trainings with TRL of a tiny random model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny_model import tiny_model
from training_rows import request, settings

from storage.errors import StepFailedError
from storage.schema import SCHEMAS
from tasks.training.order import cut_batches, digest_rows, row_order
from tasks.training.request import ModelFolder, TrainRequest
from tasks.training.rows import Rows, encode_rows
from tasks.training.trainer import train

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from tasks.training.request import TrainResult

pytestmark = pytest.mark.slow
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Spare tiny products the hand-over between threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """Hold an SFT training of a fresh adapter, used by many tests."""
    return train(request(base, tmp_path_factory.mktemp("adapter")))


def _model(folder: ModelFolder) -> Any:
    """Load a model without any code under test."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder.base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, folder.adapter).eval() if folder.adapter else model.eval()


def _logprobs(model: Any, prompt: list[int], completion: list[int]) -> list[float]:
    """Score one completion alone and plainly: no padding, all logits."""
    import torch

    with torch.no_grad():
        scores = model(input_ids=torch.tensor([prompt + completion])).logits.log_softmax(-1)[0]
    return [float(scores[len(prompt) - 1 + at, token]) for at, token in enumerate(completion)]


def _first_step(asked: TrainRequest) -> tuple[Rows, list[int]]:
    rows = encode_rows(asked)
    batches = cut_batches(asked.config, len(rows.prompts))
    return rows, row_order(rows.lengths, batches, seed=asked.seed)[: batches.batch].tolist()


def _losses(result: TrainResult) -> list[float]:
    losses: list[float] = result.train_log["loss"].to_pylist()
    return losses


def test_adapter_folder_holds_nothing_but_weights_and_a_neutral_config(adapter: TrainResult, base: Path) -> None:
    """Traps 33: trainers drop pickles beside the weights."""
    assert sorted(path.name for path in adapter.folder.iterdir()) == ["adapter_config.json", ADAPTER]
    text = (adapter.folder / "adapter_config.json").read_text()
    assert json.loads(text)["base_model_name_or_path"] == "base"
    assert str(base.parent) not in text
    names = json.loads(text)["target_modules"]
    assert names == sorted(names)
    assert sorted(path.name for path in adapter.folder.parent.iterdir()) == ["out", "work"]


def test_loss_is_the_mean_over_completion_tokens_with_verdict_and_end_of_turn(
    adapter: TrainResult, base: Path, tmp_path: Path
) -> None:
    """Traps 15 and 38: the completion mask, and padding that equals the end token."""
    rows, first = _first_step(request(base, tmp_path))
    model = _model(ModelFolder(base))
    scores = [score for row in first for score in _logprobs(model, rows.prompts[row], rows.sides["completion"][row])]
    assert _losses(adapter)[0] == pytest.approx(-sum(scores) / len(scores), abs=1e-5)
    assert _losses(adapter)[-1] < _losses(adapter)[0] - 0.5


def test_facts_and_log_say_what_was_seen(adapter: TrainResult, base: Path, tmp_path: Path) -> None:
    asked = request(base, tmp_path)
    rows, first = _first_step(asked)
    facts, log = adapter.facts, adapter.train_log
    assert (facts["train_steps"], facts["rows_seen"]) == (6, 42)
    assert facts["loss_tokens_seen"] == 2 * sum(rows.loss_tokens)
    assert 0.9 < facts["share_changed"] <= 1
    assert log.schema == SCHEMAS["train_log"]
    assert log["rows"][0].as_py() == digest_rows(first)
    assert log["learning_rate"][1].as_py() == asked.config.learning_rate
    assert log["epoch"].to_pylist()[-1] == 2.0
    assert json.loads(log["extra"][0].as_py())["mean_token_accuracy"] >= 0


def test_relative_change_is_that_of_the_effective_delta(adapter: TrainResult, base: Path) -> None:
    import torch

    model = _model(ModelFolder(base, adapter.folder))
    layers = [layer for layer in model.modules() if "default" in getattr(layer, "lora_A", {})]
    assert len(layers) == 2 * 7
    moved = torch.cat([layer.get_delta_weight("default").flatten() for layer in layers])
    weight = torch.cat([layer.get_base_layer().weight.flatten() for layer in layers])
    assert adapter.facts["relative_change"] == pytest.approx(float(moved.norm() / weight.norm()), rel=1e-4)


def test_probes_are_log_probs_of_start_and_saved_model(adapter: TrainResult, base: Path) -> None:
    models = _model(ModelFolder(base)), _model(ModelFolder(base, adapter.folder))
    assert adapter.probes.schema == SCHEMAS["probes"]
    assert adapter.probes.num_rows == 21
    for probe in adapter.probes.to_pylist()[::5]:
        cut = len(probe["ids"]) - probe["completion_tokens"]
        for model, column in zip(models, ("start_logprobs", "logprobs"), strict=True):
            assert probe[column] == pytest.approx(_logprobs(model, probe["ids"][:cut], probe["ids"][cut:]), abs=1e-4)


@pytest.mark.parametrize("method", ["star-sft", "star-dpo"])
def test_parts_of_a_batch_do_not_change_the_training(base: Path, tmp_path: Path, method: str) -> None:
    """The last step has 2 of 8 rows, and parts of 8 or of 1 must weigh every row alike."""
    results = [
        train(
            request(
                base, tmp_path / str(part), method=method, config=settings(per_device_batch=part, learning_rate=1e-3)
            )
        )
        for part in (8, 1)
    ]
    assert results[0].facts["accumulation"] != results[1].facts["accumulation"]
    assert _losses(results[0]) == pytest.approx(_losses(results[1]), abs=1e-4)
    assert results[0].train_log["rows"] == results[1].train_log["rows"]


def test_logits_of_the_completion_alone_give_the_same_gradients(base: Path) -> None:
    import torch
    from trl.trainer.utils import add_fused_lm_head

    from tasks.training.observed import completion_logits

    model = _model(ModelFolder(base))
    add_fused_lm_head(model, outputs=("log_probs",))
    ids = torch.randint(2, 300, (3, 20), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(20) < 15, -100)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs.sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole = gradient()
    with completion_logits():
        torch.testing.assert_close(gradient(), whole, atol=1e-4, rtol=1e-4)


def test_previous_adapter_is_continued(adapter: TrainResult, base: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    start = ModelFolder(base, adapter.folder)
    again = train(request(base, tmp_path, start=start))
    shapes = []
    for folder in (adapter.folder, again.folder):
        with safe_open(folder / ADAPTER, "pt") as file:
            shapes.append({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    assert shapes[0] == shapes[1]
    for before, after in zip(adapter.probes.to_pylist(), again.probes.to_pylist(), strict=True):
        assert after["start_logprobs"] == pytest.approx(before["logprobs"], abs=1e-4)
    assert _losses(again)[0] < _losses(adapter)[0] - 0.5
    with pytest.raises(StepFailedError, match="r 8 and alpha 8 differ from r 4"):
        train(request(base, tmp_path, start=start, config=settings(lora={"r": 8, "alpha": 8})))


def test_margins_are_zero_at_the_start_when_the_reference_is_the_start(
    adapter: TrainResult, base: Path, tmp_path: Path
) -> None:
    """Traps 39, for a fresh adapter and for one that is continued."""
    for number, start in enumerate([ModelFolder(base), ModelFolder(base, adapter.folder)]):
        asked = request(base, tmp_path / str(number), method="star-dpo", start=start, reference=start)
        result = train(asked)
        assert abs(json.loads(result.train_log["extra"][0].as_py())["rewards/margins"]) < 1e-4
        assert _losses(result)[0] == pytest.approx(math.log(2), abs=1e-5)
        assert _losses(result)[-1] < 0.5
        assert sorted(path.name for path in result.folder.iterdir()) == ["adapter_config.json", ADAPTER]


def test_reference_is_what_the_request_says(adapter: TrainResult, base: Path, tmp_path: Path) -> None:
    """Traps 39: TRL would take a copy of the adapter; the base was asked for. With the NLL term of the chosen side."""
    start, reference = ModelFolder(base, adapter.folder), ModelFolder(base)
    asked = request(base, tmp_path, method="star-dpo", start=start, reference=reference)
    asked = replace(asked, config=settings(beta=0.3, nll_weight=0.5, per_device_batch=8))
    rows, first = _first_step(asked)
    models = _model(start), _model(reference)

    def score(model: Any, row: int, side: str) -> list[float]:
        return _logprobs(model, rows.prompts[row], rows.sides[side][row])

    def ratio(row: int, side: str) -> float:
        return sum(score(models[0], row, side)) - sum(score(models[1], row, side))

    margins = [0.3 * (ratio(row, "chosen") - ratio(row, "rejected")) for row in first]
    chosen = [one for row in first for one in score(models[0], row, "chosen")]
    wanted = sum(math.log1p(math.exp(-margin)) for margin in margins) / len(first) - 0.5 * sum(chosen) / len(chosen)
    result = train(asked)
    assert _losses(result)[0] == pytest.approx(wanted, abs=1e-4)
    assert json.loads(result.train_log["extra"][0].as_py())["rewards/margins"] == pytest.approx(
        sum(margins) / len(margins), abs=1e-3
    )


@pytest.mark.parametrize("method", ["star-sft", "star-dpo"])
def test_all_weights_are_trained_in_fp32_and_saved_as_bf16(base: Path, tmp_path: Path, method: str) -> None:
    from safetensors import safe_open

    result = train(request(base, tmp_path, method=method, config=settings(lora=None, learning_rate=1e-3)))
    names = {path.name for path in result.folder.iterdir()}
    assert names == {path.name for path in base.iterdir()}
    for name in names - {"model.safetensors", "config.json"}:
        assert (result.folder / name).read_bytes() == (base / name).read_bytes()
    with safe_open(result.folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    model = _model(ModelFolder(result.folder))
    probe = result.probes.to_pylist()[3]
    cut = len(probe["ids"]) - probe["completion_tokens"]
    assert probe["logprobs"] == pytest.approx(_logprobs(model, probe["ids"][:cut], probe["ids"][cut:]), abs=1e-4)
    assert 0 < result.facts["share_changed"] <= 1
    assert 0 < result.facts["relative_change"] < 0.1


def test_a_checkpoint_equal_to_its_start_fails_the_step(base: Path, tmp_path: Path) -> None:
    with pytest.raises(StepFailedError, match="equals the model it started from"):
        train(request(base, tmp_path, config=settings(lora=None, learning_rate=1e-60)))


def test_a_loss_that_is_no_number_fails_the_step(base: Path, tmp_path: Path) -> None:
    with pytest.raises(StepFailedError, match=r"the loss of train step \d is nan; lower train.learning_rate"):
        train(request(base, tmp_path, config=settings(learning_rate=1e30)))


def test_one_train_step_is_not_all_warm_up(base: Path, tmp_path: Path) -> None:
    result = train(request(base, tmp_path, config=settings(max_steps=1)))
    assert result.train_log["learning_rate"].to_pylist() == [1e-2]


def _killed(base: Path, place: Path, method: str) -> None:
    """Train in a child that dies at train step 5, after the checkpoints of steps 2 and 4."""
    code = (
        "import os, sys; from pathlib import Path; from test_training_trl import interrupted; "
        "from tasks.training.trainer import train; "
        "train(interrupted(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], "
        "lambda told: os._exit(77) if told['train_step'] == 5 else None))"
    )
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests), str(tests.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code, str(base), str(place), method], env=environment, check=False)
    assert run.returncode == 77


def interrupted(base: Path, place: Path, method: str, progress: Any) -> TrainRequest:
    lora = {"r": 4, "alpha": 8, "dropout": 0.2 if method == "star-sft" else 0.0}
    config = settings(save_every=2, epochs=3, lora=lora if method == "star-sft" else None, learning_rate=1e-3)
    return request(base, place, method=method, config=config, progress=progress)


@pytest.mark.parametrize("method", ["star-sft", "star-dpo"])
def test_a_killed_training_goes_on_as_undisturbed(base: Path, tmp_path: Path, method: str) -> None:
    """An adapter with dropout (random numbers go on) and all weights; the last checkpoint is torn as well."""
    told: list[int] = []
    _killed(base, tmp_path / "killed", method)
    (state,) = (tmp_path / "killed" / "work" / "trainer").iterdir()
    assert sorted(path.name for path in state.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    torn = state / "checkpoint-4" / "optimizer.pt"
    torn.write_bytes(torn.read_bytes()[:-1])
    resumed = train(interrupted(base, tmp_path / "killed", method, lambda one: told.append(one["train_step"])))
    whole = train(interrupted(base, tmp_path / "whole", method, lambda one: None))
    assert told == [3, 4, 5, 6, 7, 8]
    assert (resumed.facts["resumed_at"], whole.facts["resumed_at"]) == (2, 0)
    assert resumed.facts["rows_seen"] == whole.facts["rows_seen"] == 63
    _same(resumed.train_log, whole.train_log)
    for probe, other in zip(resumed.probes.to_pylist(), whole.probes.to_pylist(), strict=True):
        assert probe["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)


def _same(log: pa.Table, other: pa.Table) -> None:
    for column in ("train_step", "epoch", "rows", "learning_rate"):
        assert log[column].to_pylist() == other[column].to_pylist()
    assert log["loss"].to_pylist() == pytest.approx(other["loss"].to_pylist(), abs=1e-6)
    assert log["grad_norm"].to_pylist() == pytest.approx(other["grad_norm"].to_pylist(), rel=1e-5)
