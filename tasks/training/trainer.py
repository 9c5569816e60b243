"""Train a judge: rows and a start model in, a checkpoint folder, its log and its facts out."""

from __future__ import annotations

import os
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from storage.errors import MissingDependencyError, StepFailedError
from storage.schema import empty
from tasks.training.order import cut_batches, row_order
from tasks.training.request import PROBES, TrainResult, check_request
from tasks.training.resume import TrainerState

if TYPE_CHECKING:
    from pathlib import Path

    from tasks.training.observed import Course
    from tasks.training.remote import Mirror
    from tasks.training.request import TrainRequest

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def train(request: TrainRequest) -> TrainResult:
    """Train on the rows of a request, from its own interrupted state where there is some.

    StepFailedError where rows, settings or the outcome are not what they must be. On success `out` holds the
    checkpoint; the resumable state stays for the caller to delete once the checkpoint is committed.
    """
    check_request(request)
    os.environ.update({name: os.environ.get(name, value) for name, value in _QUIET.items()})
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"training needs TRL, which can't be imported ({error}): `pip install starwheel`"
        ) from error
    from tasks.training.remote import Mirror

    state = TrainerState.open(request.work, request.token, keep=request.config.resume != "off")
    mirror = Mirror(request, state)
    try:
        resumed = mirror.restore()
        if request.config.processes > 1:
            from tasks.training.launch import train_together

            return train_together(request, resumed)
        return train_here(request, mirror, resumed)
    finally:
        mirror.close()


def train_here(request: TrainRequest, mirror: Mirror, resumed: Path | None) -> TrainResult:
    """Train in this process, with the others that it has joined; the result is that of rank 0, others give no tables.

    `resumed` is the complete checkpoint to go on from, None to begin.
    """
    from tasks.training import ranks
    from tasks.training.observed import Course
    from tasks.training.rows import encode_rows

    rows = encode_rows(request)
    batches = cut_batches(request.config, len(rows.prompts), processes=ranks.count())
    order = row_order(rows.lengths, batches, seed=request.seed)
    return _run(Course(request, rows, batches, order, mirror), resumed)


def _run(course: Course, resumed: Path | None) -> TrainResult:
    from tasks.training import ranks, scoring, weights
    from tasks.training.observed import completion_logits

    request, rows, started = course.request, course.rows, time.monotonic()
    policy = weights.load_policy(request)
    adapter = weights.adapter_state(policy) if request.config.lora else None
    chosen = scoring.choose_probes(rows, PROBES) if ranks.rank() == 0 else []
    before = scoring.probe(policy, rows, chosen, batch=course.batches.micro)
    trainer = _trainer(policy, course)
    ready = time.monotonic()
    with completion_logits():
        trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    trained = time.monotonic()
    policy = weights.whole_policy(trainer, request.start)
    if ranks.rank() > 0:
        return TrainResult(request.out, empty("train_log"), empty("probes"), {})
    facts = _seen(course, trainer.state.log_history)
    if adapter is not None:
        facts |= weights.adapter_change(policy, adapter)
    else:
        weights.round_to_bf16(policy)
        facts |= weights.full_change(policy, request.start)
    _check_moved(request, facts)
    after = scoring.probe(policy, rows, chosen, batch=course.batches.micro)
    if adapter is not None:
        weights.save_adapter(policy, request.out)
    else:
        weights.save_full(policy, request.start.base, request.out)
    first = course.mirror.state.step(resumed) if resumed else 0
    facts |= _times(course, first, ready - started, trained - ready) | _settings(course)
    table = scoring.probe_table(rows, chosen, start=before, end=after)
    return TrainResult(request.out, course.train_log(trainer.state.log_history), table, facts)


def _trainer(policy: Any, course: Course) -> Any:
    if course.request.artifact == "dpo":
        from tasks.training.dpo import dpo_trainer

        return dpo_trainer(policy, course)
    from tasks.training.sft import sft_trainer

    return sft_trainer(policy, course)


def _seen(course: Course, history: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare what the trainer saw with what it was given; StepFailedError where they differ."""
    steps = [entry for entry in history if "rows" in entry]
    seen = {
        "train_steps": len(steps),
        "rows_seen": sum(entry["row_count"] for entry in steps),
        "loss_tokens_seen": sum(entry["loss_tokens"] for entry in steps),
    }
    given = {
        "train_steps": course.batches.steps,
        "rows_seen": course.batches.total,
        "loss_tokens_seen": int(course.rows.loss_tokens[course.order].sum()),
    }
    if seen != given:
        raise StepFailedError(
            f"train: the trainer saw {seen}, but was given {given}; TRL and our rows disagree, please report it"
        )
    return seen


def _check_moved(request: TrainRequest, facts: dict[str, Any]) -> None:
    if facts["share_changed"] == 0 or facts["relative_change"] == 0:
        raise StepFailedError(
            f"train: the checkpoint equals the model it started from after {facts['train_steps']} train steps; "
            f"raise train.learning_rate (now {request.config.learning_rate:g}) or train.epochs"
        )


def _times(course: Course, first: int, setup: float, training: float) -> dict[str, Any]:
    tokens = int(course.rows.tokens[course.order[first * course.batches.batch :]].sum())
    return {
        "resumed_at": first,
        "setup_seconds": round(setup, 3),
        "train_seconds": round(training, 3),
        "tokens_per_second": round(tokens / max(training, 1e-9), 1),
    }


def _settings(course: Course) -> dict[str, Any]:
    from tasks.training.weights import on_cuda

    lora, batches, processes = course.request.config.lora, course.batches, course.request.config.processes
    low = "bf16" if on_cuda() else "fp32"
    return {
        "device": "cuda" if on_cuda() else "cpu",
        "precision": f"fp32 adapter on {low} weights"
        if lora
        else f"fp32 master weights, {low} products, saved as bf16",
        "change_of": "the adapter's effective deltas, over the weights they are added to"
        if lora
        else "all weights as saved",
        "batch": batches.batch,
        "micro_batch": batches.micro,
        "accumulation": batches.accumulation,
        "processes": processes,
        "versions": {name: metadata.version(name) for name in ("torch", "trl", "transformers", "peft", "accelerate")},
    }
