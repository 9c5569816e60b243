"""Run one job in a process of its own: a JSON spec in, events out, manifests in the store."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from configs.run import EngineKind, RunConfig
from storage.errors import StarwheelError, StepFailedError, TransientError
from storage.store import open_store
from tasks import models, split, train
from tasks.engines.base import Engine, Served
from tasks.jobs.lifeline import die_with_parent
from tasks.jobs.session import Session, SessionPlan
from tasks.models import Model
from tasks.step import Context, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class JobSpec:
    """Describe a job: its kind, where it reads and commits, the whole frozen config, and what it is asked."""

    kind: str  # base | split | session | train
    store: str
    cache: str
    work: str
    config: Mapping[str, Any]
    asked: Mapping[str, Any]

    def to_json(self) -> str:
        """Give the JSON text."""
        return json.dumps(asdict(self))


def run_job(spec: JobSpec, emit: Callable[[Event], None]) -> None:
    """Do the job and commit its steps."""
    context = Context(
        store=open_store(spec.store, cache=Path(spec.cache), create=False),
        config=RunConfig.model_validate(spec.config),
        work=Path(spec.work),
        emit=emit,
    )
    JOBS[spec.kind](context, spec)


def _base(context: Context, spec: JobSpec) -> None:
    models.make_base(context, models.base_step(context.config, Path(spec.cache)), iteration=0)


def _split(context: Context, spec: JobSpec) -> None:
    base = Model(**spec.asked["base"])
    inputs = split.fetch_sources(context.config, Path(spec.cache))
    template = load_template(context, base)
    step = split.split_step(context.config, base, inputs)
    context.ensure(step, lambda: split.make_split(context, inputs, template), iteration=0)


def _session(context: Context, spec: JobSpec) -> None:
    plan = SessionPlan.from_json(spec.asked)
    Session(context, plan, lambda first: start_engine(context, plan, first)).run()


def _train(context: Context, spec: JobSpec) -> None:
    training = train.Training.from_json(spec.asked)
    rows = context.store.manifest(training.rows)
    assert rows is not None, "train is only asked for committed rows"
    step = train.train_step(context.config, training, rows)
    if context.config.train.kind == "scripted":
        from tasks.training.scripted import train as trainer
    else:
        from tasks.training.trainer import train as trainer
    context.ensure(step, lambda: train.make_checkpoint(context, step, training, trainer), iteration=training.iteration)
    train.discard_state(context, step.key)


JOBS: Mapping[str, Callable[[Context, JobSpec], None]] = {
    "base": _base,
    "split": _split,
    "session": _session,
    "train": _train,
}


def load_template(context: Context, model: Model) -> Any:
    """Load the chat template that engine and trainer share."""
    if context.config.engine.kind is EngineKind.SCRIPTED:
        from tasks.engines.scripted import ScriptedTemplate

        return ScriptedTemplate()
    from tasks.engines.template import ChatTemplate

    return ChatTemplate(context.store.fetch_checkpoint(model.base), context.config.model.template_kwargs)


def start_engine(context: Context, plan: SessionPlan, first: str) -> Engine:
    """Start the engine that the config names, with the checkpoint's weights and, for an adapter, its base's.

    `first` is the key of the first step it is for and seeds it: later votes must not repeat the draws of earlier ones.
    """
    config, model = context.config, plan.served
    if config.engine.kind is EngineKind.SCRIPTED:
        from tasks.engines.scripted import ScriptedEngine

        return cast("Engine", ScriptedEngine())
    served, template = _served(context, model), load_template(context, model)
    seed, max_len = int(first[:8], 16) >> 1, config.model.max_len
    if config.engine.kind is EngineKind.TRANSFORMERS:
        from tasks.engines.transformers import TransformersEngine

        return cast("Engine", TransformersEngine(served, config.engine, template, max_len=max_len, seed=seed))
    from tasks.engines.vllm import VllmEngine

    return cast("Engine", VllmEngine(served, config.engine, template, max_len=max_len, seed=seed))


def _served(context: Context, model: Model) -> Served:
    """Fetch the weights; an adapter is merged into a local copy of its base where the config says so."""
    base = context.store.fetch_checkpoint(model.base)
    if model.adapter is None:
        return Served(base, model.digest)
    adapter = context.store.fetch_checkpoint(model.adapter)
    if context.config.engine.adapter == "serve":
        return Served(base, model.base, adapter, model.digest)
    from tasks.training.merge import merge_adapter

    return Served(
        merge_adapter(base, adapter, context.work / "merged", dtype=context.config.engine.dtype), model.digest
    )


def main(spec_file: str, events_fd: str, lifeline_fd: str) -> int:
    """Run the job of a spec file and write its events, one JSON line each, to a file descriptor."""
    die_with_parent(int(lifeline_fd))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    events = os.fdopen(int(events_fd), "w", buffering=1)
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            events.write(json.dumps(event) + "\n")

    try:
        run_job(JobSpec(**json.loads(Path(spec_file).read_text())), emit)
    except StarwheelError as error:
        emit({"event": "error", "kind": type(error).__name__, "message": str(error)})
        return error.exit_code
    except MemoryError as error:
        emit({"event": "error", "kind": TransientError.__name__, "message": f"out of memory: {error}"})
        return TransientError.exit_code
    except Exception as error:  # a retry would meet it again; the log has the traceback
        traceback.print_exc()
        emit({"event": "error", "kind": StepFailedError.__name__, "message": f"{type(error).__name__}: {error}"})
        return StepFailedError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
