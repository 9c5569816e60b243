"""Do the steps of a run: reuse what is committed, start a job for what is not, write the run's log."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from configs.run import Method, RunConfig
from storage import layout
from storage.claim import Claims
from storage.errors import FencedError, StepFailedError, TransientError
from storage.hold import take_run
from storage.lease import Lease
from tasks import bootstrap, indicators, models, pairs, select, split, train
from tasks.jobs.entry import JobSpec
from tasks.jobs.session import Session, SessionPlan, SessionResult
from tasks.models import Model
from tasks.step import Context, DryContext, Event, NotCommittedError, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from storage.claim import Claimed
    from storage.manifest import Manifest
    from storage.runlog import RunLog
    from storage.store import Store
    from tasks.jobs.launch import Launcher


@dataclass(frozen=True)
class Checkpoint:
    """Name a judge: number 0 is the base model or its warm start; `train` is the key of the step that made it."""

    number: int
    model: Model
    train: str | None


class Run:
    """Hold one run: each method is a step of the loop, done or found done when it returns.

    As a context manager it keeps the run's lease beating, so that no other process takes it over meanwhile.
    """

    def __init__(
        self, context: Context, run_id: str, log: RunLog, launcher: Launcher, *, listen: Callable[[Event], None]
    ) -> None:
        self.run_id, self.config, self.work = run_id, context.config, context.work
        self._launcher, self._log, self._listen = launcher, log, listen
        self._context = Context(context.store, context.config, context.work, self._heard)
        self._logged = {_use(one) for one in log.records() if one["kind"] == "step"}
        self._shown: set[tuple[Any, ...]] = set()
        backend = context.store.backend
        self._claims = Claims(backend, run_id, log.epoch or 0)
        self._lease = Lease(backend, layout.lease(run_id, log.epoch or 0), lost=log.taken_over, on_lost=self._lose)

    def __enter__(self) -> Self:
        self._lease.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._claims.release()
        self._lease.release()

    def _lose(self) -> None:
        """End the job that runs: somebody took the run over while this process was silent."""
        try:
            self._log.stop_if_fenced()
        except FencedError as fenced:
            self._launcher.stop(fenced)

    def _heard(self, event: Event) -> None:
        """Write committed steps to the log, once each, and pass on what is new."""
        if event["event"] == "asked":
            self._claims.follow(event["key"])
            return
        if event["event"] == "step":
            self._claims.done(event["key"])
            use = {name: event[name] for name in ("iteration", "step", "label", "key", "attempt", "reused")}
            if _use(use) in self._shown:
                return
            self._shown.add(_use(use))
            self._use(use)
            self.show_step(event)
        self._listen(event)

    def _use(self, use: Mapping[str, Any]) -> None:
        """Log a step, once; TransientError where it counts no more by then.

        A holder before may have ended between the record and the look, so that is looked at which is logged, too.
        """
        store = self._context.store
        if _use(use) in self._logged:
            counts = store.stays(use["key"], use["attempt"])
        else:
            counts = store.use(self._log, **use)
            self._logged.add(_use(use))
        if not counts:
            raise TransientError(
                f"attempt {use['attempt']} of step {use['step']} ({use['key'][:12]}) was voided or collected just now; "
                f"`starwheel resume {self.run_id}` computes it again"
            )

    def show_step(self, event: Event) -> None:
        """Show a committed step where there is something to show it in."""

    def close(self, outcome: str) -> None:
        """Write the end of the run to its log."""
        self._log.append("closed", outcome=outcome)

    def base(self) -> Model:
        """Put the base model into the store and name it by its digest."""
        step = models.base_step(self.config, self._cache)
        manifest = self._job("base", step, {}, iteration=0)
        return Model(**manifest.facts["model"])

    def split(self, base: Model) -> Manifest:
        """Read the pairs and cut them: dev, test, warm start, one part an iteration."""
        step = split.split_step(self.config, base, split.fetch_sources(self.config, self._cache))
        return self._job("split", step, {"base": base.to_json()}, iteration=0)

    def bootstrap(self, data: Manifest) -> Manifest:
        """Build the warm start's rows."""
        if self.config.method is Method.GENRM:
            return self._indicators(0, data, None)
        step = bootstrap.bootstrap_step(self.config, data)
        return self._here(step, lambda: bootstrap.make_bootstrap(self._context, data), iteration=0)

    def session(
        self, data: Manifest, judge: Checkpoint, base: Model, *, before: Manifest | None, sample: bool
    ) -> SessionResult:
        """Ask a checkpoint everything in one engine start: parity · evaluate · gate · sample."""
        baseline = judge.number == 0 and judge.model != base and self.config.evaluate.base
        served_together = judge.model.base == base.base and self.config.engine.adapter == "serve"
        if baseline and not served_together:  # weights of its own: the untrained judge needs an engine start of its own
            self._session(SessionPlan(0, None, base, data.key, None, None, sample=False))
        return self._session(
            SessionPlan(
                checkpoint=judge.number,
                model=judge.model,
                also=base if baseline and served_together else None,
                split=data.key,
                train=judge.train,
                previous=before.key if before else None,
                sample=sample,
            )
        )

    def _session(self, plan: SessionPlan) -> SessionResult:
        while True:
            try:
                return self._committed_session(plan)
            except NotCommittedError as gap:
                missing = gap.keys
            with self._alone(missing):
                if not any(self._context.store.manifest(key) for key in missing):
                    self._launch("session", plan.to_json())
                    return self._committed_session(plan)

    def _committed_session(self, plan: SessionPlan) -> SessionResult:
        return Session(self._context, plan, start_engine=None).run()

    def select(self, iteration: int, data: Manifest, completions: Mapping[str, Manifest]) -> Manifest:
        """Judge the completions and keep what may be trained on."""
        step = select.select_step(self.config, data, completions)
        return self._here(step, lambda: select.make_selection(self._context, data, completions), iteration=iteration)

    def pairs(
        self,
        iteration: int,
        data: Manifest,
        completions: Mapping[str, Manifest],
        *,
        selected: Manifest,
        earlier: Manifest | None,
    ) -> Manifest:
        """Build this iteration's training rows; `earlier` rows are kept where pairs.data is cumulative."""
        step = pairs.pairs_step(self.config, data, completions, selected=selected, earlier=earlier)
        return self._here(
            step,
            lambda: pairs.make_rows(self._context, data, completions, selected=selected, earlier=earlier),
            iteration=iteration,
        )

    def indicators(self, iteration: int, data: Manifest, *, earlier: Manifest | None) -> Manifest:
        """Build this iteration's training rows of the pairs' verdicts alone."""
        return self._indicators(iteration, data, earlier)

    def _indicators(self, iteration: int, data: Manifest, earlier: Manifest | None) -> Manifest:
        step = indicators.indicators_step(self.config, iteration, data, earlier=earlier)
        return self._here(
            step,
            lambda: indicators.make_indicators(self._context, iteration, data, earlier=earlier),
            iteration=iteration,
        )

    def train(self, iteration: int, rows: Manifest, base: Model, previous: Model) -> Checkpoint:
        """Train checkpoint `iteration`."""
        artifact = "dpo" if iteration and self.config.method is Method.STAR_DPO else "sft"
        if rows.artifacts[artifact].rows == 0:
            raise StepFailedError(
                f"iteration {iteration} kept no training row (see `starwheel show {self.run_id} {iteration}`); "
                "the judge never reached a right verdict: sample more, give few-shot examples or a warm start"
            )
        settings = self.config.train
        start = base if settings.init_from == "base" else previous
        reference = (base if settings.reference == "base" else previous) if artifact == "dpo" else None
        training = train.Training(iteration, rows.key, artifact, start, reference)
        step = train.train_step(self.config, training, rows)
        manifest = self._job("train", step, training.to_json(), iteration=iteration)
        self._discard_state(manifest)
        return Checkpoint(iteration, Model(**manifest.facts["model"]), manifest.key)

    def _discard_state(self, manifest: Manifest) -> None:
        """Delete what a job left that was killed right behind its commit."""
        train.discard_state(self._context, manifest.key)

    @property
    def _cache(self) -> Path:
        return self._context.store.cache.root

    def _here(self, step: Step, compute: Callable[[], Mapping[str, Any]], *, iteration: int) -> Manifest:
        """Reuse the step or compute it in this process."""
        manifest = self._context.committed(step, iteration=iteration)
        if manifest is not None:
            return self._context.done(step, manifest, reused=True, iteration=iteration)
        with self._alone([step.key]):
            return self._context.ensure(step, compute, iteration=iteration)

    def _job(self, kind: str, step: Step, asked: Mapping[str, Any], *, iteration: int) -> Manifest:
        """Reuse the step or have a job commit it."""
        manifest = self._context.committed(step, iteration=iteration)
        if manifest is not None:
            return self._context.done(step, manifest, reused=True, iteration=iteration)
        with self._alone([step.key]):
            manifest = self._context.committed(step, iteration=iteration)
            if manifest is not None:  # of another run, while this one waited
                return self._context.done(step, manifest, reused=True, iteration=iteration)
            self._launch(kind, asked)
        manifest = self._context.committed(step, iteration=iteration)
        if manifest is None:
            raise StepFailedError(f"the {kind} job ended but committed no step {step.key[:12]}; report this as a bug")
        return manifest

    @contextmanager
    def _alone(self, keys: Sequence[str]) -> Iterator[None]:
        """Claim steps for the block once no other run computes one of them; look inside whether it committed them."""
        while (other := self._claims.claim(keys)) is not None:
            self._listen({"event": "waiting", "message": self._waiting(other)})
            self._claims.wait(other, self._stop_if_fenced)
        try:
            yield
        finally:
            self._claims.release()

    def _stop_if_fenced(self) -> None:
        """Stop a run that was taken over; it may wait for long before its next append tells it."""
        self._log.records()  # reads on
        self._log.stop_if_fenced()

    def _waiting(self, other: Claimed) -> str:
        return f"{self.run_id} waits for step {other.key[:12]}, which {other} computes now, and reuses it then"

    def _launch(self, kind: str, asked: Mapping[str, Any]) -> None:
        context = self._context
        spec = JobSpec(
            kind=kind,
            store=context.store.url,
            cache=str(self._cache),
            work=str(context.work),
            config=self.config.model_dump(mode="json"),
            asked=asked,
        )
        self._launcher.run(spec, self._heard)


class DryRun(Run):
    """Walk a run without computing or writing: the first step that is not committed raises NotCommittedError."""

    def __init__(self, context: Context, listen: Callable[[Event], None]) -> None:
        self.run_id, self.config, self.work = "plan", context.config, context.work
        looking = DryContext(context.store, context.config, context.work, listen)
        self._context, self.missing = looking, looking.missing

    def _alone(self, keys: Sequence[str]) -> NoReturn:
        raise NotCommittedError("a step that is to do", keys)

    def _discard_state(self, manifest: Manifest) -> None:
        pass


def create_run(store: Store, config: RunConfig) -> str:
    """Freeze a config under a new run id; local paths become absolute, since jobs and resumes have other folders."""
    frozen = config.model_dump(mode="json")
    for source in (*frozen["data"]["sources"], *frozen["data"]["suites"]):
        source["path"] = source["path"] and _absolute(source["path"])
    if Path(config.model.base).expanduser().is_dir():
        frozen["model"]["base"] = _absolute(config.model.base)
    if config.bootstrap and config.bootstrap.rationales != split.GENERATOR:
        frozen["bootstrap"]["rationales"] = _absolute(config.bootstrap.rationales)
    frozen["interpreters"] = {
        name: _absolute(python) if python and os.sep in python else python
        for name, python in frozen["interpreters"].items()
    }
    frozen |= {name: _absolute(frozen[name]) for name in ("store", "work")}
    return store.create_run(config.name, frozen, code_version=version("starwheel"))


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def open_run(
    store: Store,
    run_id: str,
    launcher: Callable[[Path], Launcher],
    *,
    kind: type[Run],
    listen: Callable[[Event], None],
    freed: int = 0,
) -> Run:
    """Take a run over that nobody holds; HeldError where somebody does.

    Its log gets a new epoch, which stops a holder before it at its next append. `freed` is an epoch whose holder the
    caller has seen gone.
    """

    def tell(message: str) -> None:
        listen({"event": "waiting", "message": message})

    config = RunConfig.model_validate(store.run_config(run_id))
    work = Path(config.work).absolute() / run_id
    log = take_run(store, run_id, tell=tell, freed=freed, code_version=version("starwheel"))
    return kind(Context(store, config, work), run_id, log, launcher(work), listen=listen)


def _use(event: Event) -> tuple[Any, ...]:
    return event["iteration"], event["step"], event["label"], event["key"], event["attempt"]
