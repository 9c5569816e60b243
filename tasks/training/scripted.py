"""Train nothing, reproducibly: a trainer without a model, for dry runs and tests; it ships with the product."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from configs.run import key_part
from storage.digest import digest_file, digest_json, digest_table
from storage.schema import SCHEMAS
from tasks.training.order import cut_batches, digest_rows, row_order
from tasks.training.request import PROBES, TrainResult, check_request

if TYPE_CHECKING:
    from pathlib import Path

    from tasks.training.request import ModelFolder, TrainRequest

_TENSOR = (4, 8)


def train(request: TrainRequest) -> TrainResult:
    """Write weights drawn from the digest of all that is asked: other rows, start or settings, other weights."""
    from safetensors.numpy import save_file

    check_request(request)
    digest = _digest(request)
    shutil.rmtree(request.out, ignore_errors=True)
    request.out.mkdir(parents=True)
    draw = np.random.default_rng(list(bytes.fromhex(digest)))
    lora = request.config.lora
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    save_file({"scripted.weight": draw.standard_normal(_TENSOR).astype(np.float32)}, request.out / name)
    described = {"peft_type": "LORA", "r": lora.r, "lora_alpha": lora.alpha} if lora else {"model_type": "scripted"}
    (request.out / ("adapter_config.json" if lora else "config.json")).write_text(json.dumps(described, sort_keys=True))
    log = _log(request)
    facts = {"trainer": "scripted", "train_steps": log.num_rows, "rows_seen": cut(request).total, "scripted": digest}
    return TrainResult(request.out, log, _probes(request), facts)


def cut(request: TrainRequest) -> Any:
    """Give the batch sizes that the real trainer would use."""
    return cut_batches(request.config, request.rows.num_rows)


def _digest(request: TrainRequest) -> str:
    return digest_json(
        {
            "rows": digest_table(request.rows),
            "start": _folder_digest(request.start),
            "reference": _folder_digest(request.reference) if request.reference else None,
            "config": key_part(request.config),
            "seed": request.seed,
        }
    )


def _folder_digest(model: ModelFolder) -> str:
    folders: list[Path] = [folder for folder in (model.base, model.adapter) if folder is not None]
    return digest_json([[path.name, digest_file(path)] for folder in folders for path in sorted(folder.iterdir())])


def _log(request: TrainRequest) -> pa.Table:
    """Log every step with a loss that falls; tell progress as the real trainer does."""
    batches = cut(request)
    order = row_order(np.zeros(request.rows.num_rows, dtype=np.int64), batches, seed=request.seed)
    steps = range(1, batches.steps + 1)
    losses = [1.0 / step for step in steps]
    for step, loss in zip(steps, losses, strict=True):
        request.progress({"train_step": step, "train_steps": batches.steps, "loss": loss})
    parts = [order[(step - 1) * batches.batch : step * batches.batch] for step in steps]
    columns = {
        "train_step": list(steps),
        "epoch": [min(step * batches.batch, batches.total) / request.rows.num_rows for step in steps],
        "loss": losses,
        "learning_rate": [request.config.learning_rate] * batches.steps,
        "grad_norm": [None] * batches.steps,
        "rows": [digest_rows(part.tolist()) for part in parts],
        "extra": ["{}"] * batches.steps,
    }
    return pa.table(columns, schema=SCHEMAS["train_log"])


def _probes(request: TrainRequest) -> pa.Table:
    """Probe as the scripted engine answers: a token's log-prob is -token/256; the start model's is far from it."""
    from tasks.engines.scripted import ScriptedTemplate

    template = ScriptedTemplate()
    rows = request.rows.slice(0, PROBES).to_pylist()
    side = "completion" if request.artifact == "sft" else "chosen"
    answers = [template.encode(row[side][0]["content"]) for row in rows]
    prompts = template.prompts([row["prompt"] for row in rows])
    columns = {
        "pair_id": [row["pair_id"] for row in rows],
        "prompt": [row["prompt"] for row in rows],
        "ids": [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
        "completion_tokens": [len(answer) for answer in answers],
        "logprobs": [[-token / 256 for token in answer] for answer in answers],
        "start_logprobs": [[-token / 256 - 9.0 for token in answer] for answer in answers],
    }
    return pa.table(columns, schema=SCHEMAS["probes"])
