"""Run one engine session: parity · evaluate dev · gate · sample, while test and suites fill the queue."""

from __future__ import annotations

import time
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage.errors import StepFailedError
from storage.schema import part
from tasks import evaluate, gate, parity, sample, score, split
from tasks.generation import Generation, Questions
from tasks.models import Model
from tasks.step import Context, NotCommittedError, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from storage.manifest import Manifest
    from tasks.engines.base import Engine


@dataclass(frozen=True)
class SessionPlan:
    """Say what a session is for.

    Attributes:
        checkpoint: number of the checkpoint that is served.
        model: the checkpoint.
        also: the untrained base, evaluated in the same engine; None where it is the checkpoint itself.
        split: key of the split step.
        train: key of the step that trained the checkpoint; None for the base model.
        previous: key of the dev score of the checkpoint before; None at the first.
        sample: whether the checkpoint writes rationales for part `checkpoint + 1`.

    """

    checkpoint: int
    model: Model
    also: Model | None
    split: str
    train: str | None
    previous: str | None
    sample: bool

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> SessionPlan:
        """Read the JSON form."""
        models = {name: Model(**plan[name]) if plan[name] else None for name in ("model", "also")}
        return cls(**{**plan, **models})


@dataclass(frozen=True)
class SessionResult:
    """Hold what a session committed: dev score and gate, the samples or None, the scores by (model role, suite)."""

    gate: Manifest
    dev: Manifest
    samples: Manifest | None
    scores: Mapping[tuple[str, str], Manifest]


class Session:
    """Ask an engine everything a session is for; the engine starts when the first step is not committed yet.

    Without `start_engine` the session only finds what is committed and raises NotCommittedError at the first gap.
    """

    def __init__(self, context: Context, plan: SessionPlan, start_engine: Callable[[], Engine] | None) -> None:
        self.context, self.plan, self.config = context, plan, context.config
        self._start_engine = start_engine
        self._engine: Engine | None = None
        self._facts: dict[str, Any] = {}
        self._split = split.committed_split(context, plan.split)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="commit")
        self._models = {"judge": plan.model, **({"base": plan.also} if plan.also else {})}
        self._waiting: deque[Generation] = deque()
        self._flying: list[Generation] = []
        self._in_flight = 0
        self._shown = time.monotonic()

    @property
    def engine(self) -> Engine:
        """Start the engine once."""
        if self._start_engine is None:
            raise NotCommittedError("session")
        if self._engine is None:
            started = time.monotonic()
            self._engine = self._start_engine()
            self._facts = {
                "engine": {
                    "start": uuid.uuid4().hex,
                    "kind": str(self.config.engine.kind),
                    "pids": list(self._engine.pids),
                    "start_seconds": round(time.monotonic() - started, 3),
                }
            }
        return self._engine

    def run(self) -> SessionResult:
        """Commit every step of the session."""
        try:
            return self._run()
        finally:
            if self._engine is not None:
                self._engine.close()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> SessionResult:
        self._check_parity()
        dev = self._evaluate("judge", "dev", self.config.evaluate.dev_votes)
        later = {
            (role, suite): self._evaluate(role, suite, self.config.evaluate.votes)
            for role in self._models
            for suite in self._split.suites
        }
        self._finish(dev)
        dev_score = self._score("judge", "dev", dev)
        decision = self._gate(dev_score)
        samples = None
        if self.plan.sample and decision.facts["decision"] == "go":
            asked = self._sample()
            self._finish([asked])
            samples = asked.manifest
        for evaluated in later.values():
            self._finish(evaluated)
        scores = {(role, suite): self._score(role, suite, evaluated) for (role, suite), evaluated in later.items()}
        return SessionResult(decision, dev_score, samples, scores)

    def _check_parity(self) -> None:
        if self.plan.train is None:
            return
        train = self.context.store.manifest(self.plan.train)
        if train is None:
            raise StepFailedError(f"step {self.plan.train[:12]} (train) is not committed any more; resume the run")
        step = parity.parity_step(self.config, train, self.plan.model)
        self.context.ensure(step, lambda: self._parity(train), iteration=self.plan.checkpoint)

    def _parity(self, train: Manifest) -> dict[str, Any]:
        probes = self.context.store.read(train.artifacts["probes"])
        made = parity.check_parity(probes, self.engine, self.plan.model)
        return {**made, "facts": {**made["facts"], **self._facts}}

    def _evaluate(self, role: str, suite: str, votes: int) -> list[Asked]:
        pairs, digest, model = self._split.pairs(suite), self._split.digest(suite), self._models[role]
        return [
            self._ask(
                _labelled(evaluate.evaluate_step(self.config, digest, model, block), role, str(block)),
                partial(evaluate.evaluate_questions, self.config, pairs, model, block),
            )
            for block in evaluate.blocks(suite, votes)
        ]

    def _sample(self) -> Asked:
        name = part(self.plan.checkpoint + 1)
        step = sample.sample_step(self.config, self._split.digest(name), self.plan.model)
        return self._ask(
            step,
            lambda: sample.sample_questions(self.config, self._split.pairs(name), self.plan.model),
            iteration=self.plan.checkpoint + 1,
            first=True,
        )

    def _ask(
        self, step: Step, questions: Callable[[], Questions], *, iteration: int | None = None, first: bool = False
    ) -> Asked:
        """Reuse the step or put its questions into the queue; `first` goes before what waits."""
        number = self.plan.checkpoint if iteration is None else iteration
        manifest = self.context.committed(step)
        if manifest is not None:
            return Asked(None, self.context.done(step, manifest, reused=True, iteration=number))
        if self._start_engine is None:
            return Asked(None, None)
        generation = Generation(self.context, step, questions(), self.engine, iteration=number)
        self._waiting.appendleft(generation) if first else self._waiting.append(generation)
        return Asked(generation, None)

    def _finish(self, asked: Iterable[Asked]) -> None:
        """Keep the engine full until these are answered, then commit them."""
        for one in asked:
            if one.manifest is not None:
                continue
            if one.generation is None:
                raise NotCommittedError("session")
            while not one.generation.answered:
                self._advance()
            one.manifest = one.generation.commit(self._facts)

    def _advance(self) -> None:
        while self._in_flight < 2 * self.engine.capacity and self._waiting:
            request = self._waiting[0].next_request()
            if request is None:
                self._flying.append(self._waiting.popleft())
                continue
            self.engine.add(request)
            self._in_flight += request.sampling.n if request.sampling else 1
        by_key = {one.step.key: one for one in (*self._waiting, *self._flying)}
        for response in self.engine.poll():
            generation = by_key[response.tag[0]]
            self._in_flight -= generation.weight(response)
            for request in generation.accept(response, self._pool):
                self.engine.add(request)
                self._in_flight += 1
        self._show()

    def _show(self) -> None:
        if time.monotonic() - self._shown < 1:
            return
        self._shown = time.monotonic()
        for one in (*self._flying, *self._waiting):
            if not one.answered:
                self.context.emit(one.progress())

    def _score(self, role: str, suite: str, asked: Sequence[Asked]) -> Manifest:
        evaluated = [one.committed for one in asked]
        step = _labelled(score.score_step(evaluated, self._split.manifest, suite), role, suite)

        def compute() -> dict[str, Any]:
            tables = [self.context.store.read(one.artifacts["completions"]) for one in evaluated]
            return score.make_score(pa.concat_tables(tables), self._split.pairs(suite), suite)

        return self.context.ensure(step, compute, iteration=self.plan.checkpoint)

    def _gate(self, dev: Manifest) -> Manifest:
        before = self.context.store.manifest(self.plan.previous) if self.plan.previous else None
        step = gate.gate_step(self.config, dev, before)
        store = self.context.store
        return self.context.ensure(
            step, lambda: gate.make_gate(self.config, store, dev, before), iteration=self.plan.checkpoint
        )


def _labelled(step: Step, role: str, label: str) -> Step:
    return replace(step, label=f"base {label}" if role == "base" else label)


@dataclass
class Asked:
    """Follow a step through the session: its questions while they run, its manifest when it is committed."""

    generation: Generation | None
    manifest: Manifest | None

    @property
    def committed(self) -> Manifest:
        """Give the manifest; the step must be finished."""
        assert self.manifest is not None
        return self.manifest
