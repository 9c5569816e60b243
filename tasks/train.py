"""Train the next checkpoint on the rows of an iteration (paper, section 3.3)."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from configs.run import Method, RunConfig, TrainConfig, key_part
from tasks.models import Model
from tasks.step import Context, Event, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from storage.manifest import Manifest

VERSION = 1


@dataclass(frozen=True)
class Training:
    """Say what is trained: rows (a step's key and artifact), from which model, against which reference (DPO)."""

    iteration: int
    rows: str
    artifact: str  # sft | dpo
    start: Model
    reference: Model | None

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, training: Mapping[str, Any]) -> Training:
        """Read the JSON form."""
        models = {name: Model(**training[name]) if training[name] else None for name in ("start", "reference")}
        return cls(**{**training, **models})


def train_config(config: RunConfig, training: Training) -> TrainConfig:
    """Give the settings of a training: the warm start may have its own epochs and learning rate."""
    if training.iteration or config.bootstrap is None:
        return config.train
    own = {
        name: value
        for name, value in (("epochs", config.bootstrap.epochs), ("learning_rate", config.bootstrap.learning_rate))
        if value is not None
    }
    return config.train.model_copy(update={**own, "max_steps": None})


def train_step(config: RunConfig, training: Training, rows: Manifest) -> Step:
    """Name the step by its rows, the model it starts from and, for DPO, the reference model."""
    dpo = training.artifact == "dpo"
    settings = key_part(train_config(config, training))
    for resolved in ("init_from", "reference"):  # the digests among the inputs say what they name
        del settings[resolved]
    if not dpo:
        settings = {name: value for name, value in settings.items() if name not in {"beta", "nll_weight"}}
    parts = {
        "method": str(Method.STAR_DPO if dpo else Method.STAR_SFT),
        "train": settings,
        "max_len": config.model.max_len,
        "template_kwargs": config.model.template_kwargs,
        "seed": config.seed,
    }
    inputs = {
        "rows": rows.artifacts[training.artifact].digest,
        "start": training.start.digest,
        "reference": training.reference.digest if training.reference else None,
    }
    return Step("train", VERSION, inputs, parts)


def make_checkpoint(context: Context, step: Step, training: Training, trainer: Callable[..., Any]) -> dict[str, Any]:
    """Train in the work folder and put the checkpoint into the store; its state is deleted after the commit."""
    from tasks.training.request import ModelFolder, TrainRequest

    store, config = context.store, context.config
    rows = store.manifest(training.rows)
    assert rows is not None, "train is only asked for committed rows"

    def folder(model: Model) -> ModelFolder:
        return ModelFolder(
            store.fetch_checkpoint(model.base), store.fetch_checkpoint(model.adapter) if model.adapter else None
        )

    def progress(numbers: Mapping[str, Any]) -> None:
        context.emit(_progress(training, numbers))

    scratch = context.work / "train" / step.key
    result = trainer(
        TrainRequest(
            method=str(step.parts["method"]),
            rows=store.read(rows.artifacts[training.artifact]),
            start=folder(training.start),
            reference=folder(training.reference) if training.reference else None,
            config=train_config(config, training),
            max_len=config.model.max_len,
            seed=int(step.key[:8], 16) >> 1,
            template_kwargs=config.model.template_kwargs,
            work=scratch,
            token=step.key,
            out=scratch / "out",
            progress=progress,
            remote=store.state(step.key) if config.train.resume == "store" else None,
            warn=context.warn,
        )
    )
    checkpoint = store.put_checkpoint(result.folder).digest
    model = Model(training.start.base, checkpoint) if config.train.lora else Model(checkpoint)
    number = rows.artifacts[training.artifact].rows
    return {
        "tables": {"train_log": result.train_log, "probes": result.probes},
        "counts": {"in": number, "kept": number, "dropped": {}},
        "facts": {**result.facts, "model": model.to_json()},
    }


def discard_state(context: Context, key: str) -> None:
    """Delete the trainer's state, here and in the store, once its step is committed."""
    shutil.rmtree(context.work / "train" / key, ignore_errors=True)
    if context.config.train.resume == "store":
        context.store.state(key).discard()


def _progress(training: Training, numbers: Mapping[str, Any]) -> Event:
    return {
        "event": "progress",
        "step": "train",
        "label": "",
        "iteration": training.iteration,
        "done": numbers["train_step"],
        "total": numbers["train_steps"],
        "unit": "train steps",
        "loss": numbers["loss"],
        "tokens_per_second": numbers.get("tokens_per_second"),
        "eta": numbers.get("eta_seconds"),
    }
