"""Run one engine session: parity · evaluate dev · gate · sample, while test and suites fill the queue.

Behind sample: broken completions are mended, and pairs that failed are asked again with the answer shown.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from configs.run import Method
from storage.errors import StepFailedError
from storage.schema import empty, part
from tasks import evaluate, gate, generation, parity, rationalize, repair, sample, score, split
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
        model: the checkpoint; None where the session only evaluates the untrained base.
        also: the untrained base, evaluated too; None where it is the checkpoint itself.
        split: key of the split step.
        train: key of the step that trained the checkpoint; None for the base model.
        previous: key of the dev score of the checkpoint before; None at the first.
        sample: whether the checkpoint writes rationales for part `checkpoint + 1`.

    """

    checkpoint: int
    model: Model | None
    also: Model | None
    split: str
    train: str | None
    previous: str | None
    sample: bool

    @property
    def served(self) -> Model:
        """Name the model whose weights the engine loads."""
        served = self.model or self.also
        assert served is not None, "a session serves something"
        return served

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
    """Hold what a session committed: dev score (None without dev pairs), completions, and what the gate said.

    `completions` are by what they are: `completions` of every pair, `repaired` ones that stand in for broken ones, and
    `hinted` ones of failed pairs that were asked again with the answer shown; empty where nothing is sampled.
    """

    dev: Manifest | None = None
    completions: Mapping[str, Manifest] = field(default_factory=dict)
    goes_on: bool = True


class Session:
    """Ask an engine everything a session is for; the engine starts when the first step is not committed yet.

    Without `start_engine` the session only finds what is committed and raises NotCommittedError at the first gap.
    """

    def __init__(self, context: Context, plan: SessionPlan, start_engine: Callable[[str], Engine] | None) -> None:
        self.context, self.plan, self.config = context, plan, context.config
        self._start_engine = start_engine
        self._engine: Engine | None = None
        self._first = ""  # key of the first step that was not committed: it seeds the engine
        self._facts: dict[str, Any] = {}
        self._split = split.committed_split(context, plan.split)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="commit")
        self._models = {role: model for role, model in (("judge", plan.model), ("base", plan.also)) if model}
        self._asked: dict[str, Asked] = {}
        self._gaps: list[str] = []  # what was found not committed where no engine may start
        self._waiting: deque[Generation] = deque()
        self._running: dict[str, Generation] = {}
        self._in_flight = 0
        self._looked = time.monotonic()  # when the engine's time was last shared out
        self._shown = time.monotonic()

    @property
    def engine(self) -> Engine:
        """Start the engine once."""
        if self._start_engine is None:
            raise NotCommittedError("session", self._gaps or [self._first])
        if self._engine is None:
            started = time.monotonic()
            self._engine = self._start_engine(self._first)
            self._facts = {
                "engine": {
                    "start": uuid.uuid4().hex,
                    "settings": self.config.engine.model_dump(mode="json"),
                    "pids": list(self._engine.pids),
                    "start_seconds": round(time.monotonic() - started, 3),
                }
            }
        return self._engine

    def run(self) -> SessionResult:
        """Commit every step of the session."""
        try:
            return self._run() if self.plan.model else self._run_baseline(self._ask_suites())
        finally:
            try:
                if self._engine is not None:
                    self._engine.close()
            finally:
                self._pool.shutdown(wait=True)  # what is answered is still saved

    def _run(self) -> SessionResult:
        self._check_parity()
        dev = self._evaluate("judge", "dev") if self._split.size("dev") else []
        later = self._ask_suites()
        self._finish(dev)
        dev_score = self._score("judge", "dev", dev) if dev else None
        decision = self._gate(dev_score)
        goes_on = decision.facts["decision"] == "go"
        written = self._write() if self.plan.sample and goes_on else {}
        self._score_suites(later)
        return SessionResult(dev_score, written, goes_on)

    def _run_baseline(self, later: Mapping[tuple[str, str], list[Asked]]) -> SessionResult:
        """Evaluate the untrained base, which is neither gated nor sampled."""
        self._score_suites(later)
        return SessionResult()

    def _ask_suites(self) -> dict[tuple[str, str], list[Asked]]:
        return {(role, suite): self._evaluate(role, suite) for role in self._models for suite in self._split.suites}

    def _score_suites(self, later: Mapping[tuple[str, str], list[Asked]]) -> None:
        for evaluated in later.values():
            self._finish(evaluated)
        for (role, suite), evaluated in later.items():
            self._score(role, suite, evaluated)

    def _check_parity(self) -> None:
        if self.plan.train is None or self.plan.model is None:
            return
        train = self.context.store.manifest(self.plan.train)
        if train is None:
            raise StepFailedError(f"step {self.plan.train[:12]} (train) is not committed any more; resume the run")
        model = self.plan.model
        step = parity.parity_step(self.config, train, model)
        self._first = step.key
        self.context.ensure(step, lambda: self._parity(train, model), iteration=self.plan.checkpoint)
        self._first = self._first if self._engine else ""

    def _parity(self, train: Manifest, model: Model) -> dict[str, Any]:
        probes = self.context.store.read(train.artifacts["probes"])
        made = parity.check_parity(probes, self.engine, model)
        return {**made, "facts": {**made["facts"], **self._facts}}

    def _evaluate(self, role: str, suite: str) -> list[Asked]:
        pairs, digest, model = self._split.pairs(suite), self._split.digest(suite), self._models[role]
        return [
            self._ask(
                _labelled(evaluate.evaluate_step(self.config, digest, model, block), role, str(block)),
                partial(evaluate.evaluate_questions, self.config, pairs, model, block),
            )
            for block in evaluate.blocks(self.config, suite)
        ]

    def _write(self) -> dict[str, Manifest]:
        """Have rationales written, broken ones mended and failed pairs asked again where the config says so."""
        name, method = part(self.plan.checkpoint + 1), self.config.method
        if method is Method.STAR_RATIONALIZER:
            return {"completions": self._rationalize(self._split.pairs(name))}
        if method is Method.GENRM:
            return {}
        written = {"completions": self._sample(name)}
        if repair.wanted(self.config):
            written["repaired"] = self._repair(written["completions"], self._split.pairs(name))
        if self.config.rationalize.failures:
            completions = generation.read_all(self.context.store, written)
            written["hinted"] = self._rationalize(rationalize.failed(completions, self._split.pairs(name)))
        return written

    def _sample(self, name: str) -> Manifest:
        model = self._models["judge"]
        step = sample.sample_step(self.config, self._split.digest(name), model)
        return self._written(step, lambda: sample.sample_questions(self.config, self._split.pairs(name), model))

    def _repair(self, samples: Manifest, pairs: pa.Table) -> Manifest:
        model = self._models["judge"]
        step, number = repair.repair_step(self.config, samples, model), self.plan.checkpoint + 1
        if self._start_engine is None or self.context.committed(step, iteration=number):
            rows = empty("completions")  # they are only looked at where they are mended
        else:
            rows = repair.broken(self.config, self.context.store.read(samples.artifact("completions")), pairs)
            if rows.num_rows == 0:
                return self.context.ensure(step, repair.nothing, iteration=number)
        return self._written(step, lambda: repair.repair_questions(self.config, rows, pairs, model))

    def _rationalize(self, pairs: pa.Table) -> Manifest:
        model = self._models["judge"]
        step = rationalize.rationalize_step(self.config, pairs, model)
        if pairs.num_rows == 0:
            return self.context.ensure(step, rationalize.nothing, iteration=self.plan.checkpoint + 1)
        return self._written(step, lambda: rationalize.rationalize_questions(self.config, pairs, model))

    def _written(self, step: Step, questions: Callable[[], Questions]) -> Manifest:
        asked = self._ask(step, questions, iteration=self.plan.checkpoint + 1, first=True)
        self._finish([asked])
        return asked.committed

    def _ask(
        self, step: Step, questions: Callable[[], Questions], *, iteration: int | None = None, first: bool = False
    ) -> Asked:
        """Reuse the step or put its questions into the queue, once a key; `first` goes before what waits."""
        number = self.plan.checkpoint if iteration is None else iteration
        manifest = self.context.committed(step, iteration=number)
        if manifest is not None:
            return Asked(None, self.context.done(step, manifest, reused=True, iteration=number))
        if self._start_engine is None:
            self._gaps.append(step.key)
            return Asked(None, None)
        if step.key not in self._asked:
            self.context.emit({"event": "asked", "key": step.key})
            self._first = self._first or step.key
            generation = Generation(self.context, step, questions(), self.engine, iteration=number)
            self._waiting.appendleft(generation) if first else self._waiting.append(generation)
            self._asked[step.key] = Asked(generation, None)
        return self._asked[step.key]

    def _finish(self, asked: Iterable[Asked]) -> None:
        """Keep the engine full until these are answered, then commit them."""
        for one in asked:
            if one.manifest is not None:
                continue
            if one.generation is None:
                raise NotCommittedError("session", self._gaps)
            while not one.generation.answered:
                self._advance()
            one.manifest = one.generation.commit(self._facts)
            self._running.pop(one.generation.step.key, None)

    def _advance(self) -> None:
        if not self._in_flight:
            self._looked = time.monotonic()  # it was asked nothing
        while self._in_flight < 2 * self.engine.capacity and self._waiting:
            request = self._waiting[0].next_request()
            if request is None:
                self._waiting.popleft()
                continue
            self._running[self._waiting[0].step.key] = self._waiting[0]
            self.engine.add(request)
            self._count(self._waiting[0], request.sampling.n if request.sampling else 1)
        responses = self.engine.poll()
        self._share_time()
        for response in responses:
            generation = self._running[response.tag[0]]
            self._count(generation, -generation.weight(response))
            for request in generation.accept(response, self._pool):
                self.engine.add(request)
                self._count(generation, 1)
        self._show()

    def _count(self, generation: Generation, sequences: int) -> None:
        generation.in_flight += sequences
        self._in_flight += sequences

    def _share_time(self) -> None:
        """Add the time since the last look to the steps with something in flight, by their sequences."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        for one in self._running.values():
            one.seconds += passed * one.in_flight / max(self._in_flight, 1)

    def _show(self) -> None:
        if time.monotonic() - self._shown < 1:
            return
        self._shown = time.monotonic()
        for one in self._running.values():
            if not one.answered:
                self.context.emit(one.progress())

    def _score(self, role: str, suite: str, asked: Sequence[Asked]) -> Manifest:
        evaluated = [one.committed for one in asked]
        artifact = evaluate.artifact(self.config)
        make = score.make_score if artifact == "completions" else score.make_choice_score
        step = _labelled(score.score_step(evaluated, self._split.manifest, suite, artifact=artifact), role, suite)

        def compute() -> dict[str, Any]:
            tables = [self.context.store.read(one.artifacts[artifact]) for one in evaluated]
            return make(pa.concat_tables(tables), self._split.pairs(suite), suite)

        return self.context.ensure(step, compute, iteration=self.plan.checkpoint)

    def _gate(self, dev: Manifest | None) -> Manifest:
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
