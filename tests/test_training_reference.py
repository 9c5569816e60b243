"""Every combination of init_from, reference, adapter and whole weights: DPO starts and compares as the config says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import trained
from tiny_model import tiny_model
from training_rows import dpo_rows, request, sft_rows

from storage.errors import StepFailedError
from storage.store import Store, open_store
from tasks.training.rows import encode_rows
from tasks.training.trainer import train

if TYPE_CHECKING:
    from pathlib import Path

    from configs.run import RunConfig
    from storage.manifest import Manifest
    from tasks.models import Model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_fsync")]

ROWS = 9
LORA = {"lora": trained.ADAPTER, "learning_rate": 1e-2}
FULL = {"lora": None, "learning_rate": 1e-3}
BETA = 0.5


@dataclass
class Trained:
    """A store with rows and two models: the base, and one that was trained from it before."""

    folder: Path
    store: Store
    kind: dict[str, Any]
    models: dict[str, Model]
    rows: Manifest

    def config(self, **changes: Any) -> RunConfig:
        one_step = {"max_steps": 1, "batch_size": ROWS, "per_device_batch": ROWS, "beta": BETA}
        return trained.described(self.folder, **self.kind, **one_step, **changes)


@pytest.fixture(scope="module", params=[LORA, FULL], ids=["lora", "full"])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    warm = trained.described(folder, **request.param, batch_size=4, epochs=2)
    store = open_store(warm.store)
    base = trained.put_base(store, tiny_model(folder / "tiny"))
    manifest = trained.train(warm, trained.put_rows(store, "sft", sft_rows(ROWS)), base, base)
    models = {"base": base, "previous": type(base)(**manifest.facts["model"])}
    assert models["previous"] != base
    return Trained(folder, store, request.param, models, trained.put_rows(store, "dpo", dpo_rows(ROWS)))


def logprobs(done: Trained, name: str) -> dict[str, float]:
    """Score both sides of all rows under a model, each alone and without the code under test; the mean of the sums."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    named = done.models[name]
    model = AutoModelForCausalLM.from_pretrained(done.store.fetch_checkpoint(named.base), dtype=torch.float32)
    if named.adapter:
        model = PeftModel.from_pretrained(model, done.store.fetch_checkpoint(named.adapter))
    rows = encode_rows(request(done.store.fetch_checkpoint(named.base), done.folder, method="star-dpo"))
    found = dict.fromkeys(rows.sides, 0.0)
    with torch.no_grad():
        for side, completions in rows.sides.items():
            for prompt, ids in zip(rows.prompts[:ROWS], completions[:ROWS], strict=True):
                scores = model.eval()(input_ids=torch.tensor([prompt + ids])).logits.log_softmax(-1)[0]
                found[side] += sum(float(scores[len(prompt) - 1 + at, token]) for at, token in enumerate(ids)) / ROWS
    return found


@pytest.mark.parametrize("reference", ["base", "previous"])
@pytest.mark.parametrize("init_from", ["base", "previous"])
def test_dpo_starts_from_and_compares_with_the_models_that_are_named(
    done: Trained, init_from: str, reference: str
) -> None:
    """Traps 39: the reference is neither the start nor the adapter switched off, but what the config says."""
    config = done.config(init_from=init_from, reference=reference)
    manifest = trained.train(config, done.rows, done.models["base"], done.models["previous"])
    first = json.loads(done.store.read(manifest.artifact("train_log"))["extra"][0].as_py())
    start, compared = logprobs(done, init_from), logprobs(done, reference)
    for side in ("chosen", "rejected"):
        assert first[f"logps/{side}"] == pytest.approx(start[side], abs=1e-3)
        at_reference = first[f"logps/{side}"] - first[f"rewards/{side}"] / BETA
        assert at_reference == pytest.approx(compared[side], abs=1e-3)
    other = logprobs(done, "previous" if reference == "base" else "base")
    assert abs(compared["chosen"] - other["chosen"]) > 0.1, "the two models must differ for this to mean anything"
    assert manifest.inputs["start"] == done.models[init_from].digest
    assert manifest.inputs["reference"] == done.models[reference].digest
    assert 0 < manifest.facts["share_changed"] <= 1
    assert 0 < manifest.facts["relative_change"] < 1


@pytest.mark.parametrize("kind", [LORA, FULL], ids=["lora", "full"])
def test_a_checkpoint_equal_to_its_start_is_no_checkpoint(tmp_path: Path, kind: dict[str, Any]) -> None:
    """A gradient of exactly zero: adapters and whole weights stay where they were, and the step fails."""
    base = tiny_model(tmp_path / "tiny")
    settings = trained.described(tmp_path, **kind, beta=1e-60, weight_decay=0, max_steps=2).train
    with pytest.raises(StepFailedError, match="equals the model it started from after 2 train steps"):
        train(request(base, tmp_path, method="star-dpo", config=settings))
