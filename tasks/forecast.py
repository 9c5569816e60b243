"""Estimate what the steps that are to do will take: rows, tokens, wall time, GPU hours, bytes, engine starts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from configs.facts import find_facts
from configs.run import EngineKind, Method, RunConfig, SampleOrder
from storage.schema import Split, part
from tasks import rates, repair
from tasks.earlier import Place
from tasks.estimate import ASSUMED, LEAST_SECONDS, LEAST_TOKENS, REFERENCE_CPU, REFERENCE_GPU, Estimate, Range, total
from tasks.rates import WRITTEN, Measured
from tasks.step import software
from tasks.training.order import cut_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tasks.plan import Planned
    from tasks.sizes import Sizes

START = "engine start"
COLUMNS = ("rows", "prompt_tokens", "tokens", "seconds", "gpu_hours", "bytes")


@dataclass(frozen=True)
class Costed:
    """Hold a step that is to do, or the start of an engine before the steps of its session, and its estimate."""

    place: Place
    estimate: Estimate

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form; a range is `{value, low, high}`."""
        estimate = self.estimate
        ranges = {name: getattr(estimate, name) for name in COLUMNS}
        shown = {name: one._asdict() if one else None for name, one in ranges.items()}
        return {**self.place._asdict(), **shown, "gpus": estimate.gpus, "source": estimate.source}


@dataclass(frozen=True)
class Forecast:
    """Hold the estimates of all steps that are to do, in order; `sizes` says where counts and lengths are from."""

    steps: tuple[Costed, ...]
    sizes: str

    def totals(self) -> dict[str, Range]:
        """Add up what is known of each column."""
        return {name: total(getattr(one.estimate, name) for one in self.steps) for name in COLUMNS}

    def engine_starts(self) -> int:
        """Count the engine starts."""
        return sum(one.place.step == START for one in self.steps)

    def unknown(self) -> list[str]:
        """Name the kinds of step whose time isn't known."""
        return list(dict.fromkeys(one.place.step for one in self.steps if one.estimate.seconds is None))

    def suites(self) -> dict[str, dict[str, Range]]:
        """Add up the evaluation of each suite over all checkpoints."""
        parted: dict[str, list[Estimate]] = defaultdict(list)
        for one in self.steps:
            if one.place.step == "evaluate":
                parted[rates.suite_of(one.place.label)].append(one.estimate)
        return {
            suite: {name: total(getattr(one, name) for one in parts) for name in COLUMNS}
            for suite, parts in parted.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        plain = {name: one._asdict() for name, one in self.totals().items()}
        suites = {suite: {name: one._asdict() for name, one in parts.items()} for suite, parts in self.suites().items()}
        return {
            "steps": [one.to_json() for one in self.steps],
            "totals": {**plain, "engine_starts": self.engine_starts()},
            "suites": suites,
            "sizes": self.sizes,
            "unknown": self.unknown(),
        }


def forecast(config: RunConfig, planned: Sequence[Planned], sizes: Sizes, measured: Measured) -> Forecast:
    """Estimate each planned step that is to do, by the rates of an earlier run where there are some."""
    forecaster = _Forecaster(config, sizes, measured)
    costed: list[Costed] = []
    started: set[tuple[int, bool]] = set()
    for one in planned:
        place = Place(one.iteration, one.step, one.label)
        rows = forecaster.rows(place, one.rows)
        if one.state == "reused":
            forecaster.take(place, one.rows)  # later steps go on from what it wrote
            continue
        session = _session(config, place)
        if session is not None and session not in started:
            started.add(session)
            costed.append(Costed(Place(session[0], START, "base" if session[1] else ""), forecaster.start()))
        costed.append(Costed(place, forecaster.estimate(place, rows)))
    return Forecast(tuple(costed), sizes.source)


def _session(config: RunConfig, place: Place) -> tuple[int, bool] | None:
    """Name the engine start that a step needs: its checkpoint, and whether the untrained judge has one of its own."""
    if place.step not in (*WRITTEN, "parity"):
        return None
    apart = config.engine.adapter == "merge" or config.train.lora is None
    checkpoint = place.iteration - (place.step in rates.FOR_TRAINING)
    return checkpoint, place.label.startswith("base ") and apart


@dataclass
class _Forecaster:
    config: RunConfig
    sizes: Sizes
    measured: Measured
    trained: dict[int, Range] = field(default_factory=dict)  # iteration -> training rows

    def __post_init__(self) -> None:
        named = self.config.hardware
        gpus = named.gpus if named else len(software()["host"]["gpus"])
        scripted = self.config.engine.kind is EngineKind.SCRIPTED
        self._gpus = 0 if scripted else min(gpus, self.config.engine.tensor_parallel)
        self._train_gpus = 0 if self.config.train.kind == "scripted" else min(gpus, self.config.train.processes)
        self._writer = "scripted" if scripted else "gpu" if gpus else "cpu"
        self._trainer = "scripted" if self.config.train.kind == "scripted" else "gpu" if gpus else "cpu"
        facts = find_facts(self.config.model) if not scripted else None
        self._parameters = facts.parameters if facts else None

    # ---- rows

    def take(self, place: Place, rows: int | None) -> None:
        """Count on what a reused step wrote instead of an estimate."""
        if place.step in ("pairs", "indicators", "bootstrap") and rows is not None:
            self.trained[place.iteration] = Range.exactly(rows)

    def rows(self, place: Place, planned: int | None) -> Range | None:
        """Give the rows that a step writes."""
        step, iteration = place.step, place.iteration
        if step in ("evaluate", "sample") or (step == "rationalize" and planned is not None):
            return None if planned is None else self._room(Range.exactly(planned))
        if step == "repair":
            return self._broken(iteration)
        if step == "rationalize":
            return self._failed(iteration)
        if step == "select":
            return self._written(iteration)
        if step in ("pairs", "indicators", "bootstrap"):
            self.trained[iteration] = self._training_rows(place, planned) or Range.exactly(0)
            return self.trained[iteration]
        if step == "train":
            return self.trained.get(iteration)
        return None

    def _room(self, rows: Range) -> Range:
        return rows if self.sizes.exact else rows.widened(LEAST_TOKENS)

    def _asked(self, iteration: int) -> Range | None:
        """Count the prompts of an iteration's part."""
        pairs = self.sizes.count(part(iteration))
        return pairs.times(2 if self.config.sample.order is SampleOrder.BOTH else 1) if pairs else None

    def _written(self, iteration: int) -> Range | None:
        asked = self._asked(iteration)
        if asked is None:
            return None
        written = asked.times(self.config.sample.n)
        again = self._failed(iteration) if self.config.rationalize.failures else None
        return written.plus(again) if again else written

    def _broken(self, iteration: int) -> Range | None:
        asked = self._asked(iteration)
        statuses = repair.mended_statuses(self.config)
        share = rates.broken_share(self.measured.manifests, statuses) or ASSUMED["broken"].range
        return asked.times(self.config.sample.n).times(share) if asked else None

    def _failed(self, iteration: int) -> Range | None:
        pairs = self.sizes.count(part(iteration))
        orders = 2 if self.config.sample.order is SampleOrder.BOTH else 1
        assumed = ASSUMED["failed"].range.times(self.config.rationalize.n * orders)
        measured = rates.failed_share(self.measured.manifests)
        share = measured.times(self.config.rationalize.n * orders) if measured else assumed
        return pairs.times(share) if pairs else None

    def _training_rows(self, place: Place, planned: int | None) -> Range | None:
        if place.step == "bootstrap":
            return None if planned is None else self._room(Range.exactly(planned))
        asked = self._asked(place.iteration) if place.iteration else self.sizes.count(Split.BOOTSTRAP)
        if asked is None:
            return None
        fresh = asked
        if place.step == "pairs":
            share = self.measured.mean(place, rates.row_yield, room=LEAST_TOKENS)
            fresh = asked.times(share or self._assumed_yield())
        before = self.trained.get(place.iteration - 1)
        return fresh.plus(before) if before and self.config.pairs.data == "cumulative" else fresh

    def _assumed_yield(self) -> Range:
        config = self.config
        assumed = ASSUMED[f"yield {config.method}"].range
        if config.method is Method.STAR_DPO:
            return assumed.times(config.pairs.max_per_pair)
        most = config.sample.n if config.select.keep_per_pair is None else config.select.keep_per_pair
        return assumed.times(min(most, config.sample.n))

    # ---- what a step takes

    def start(self) -> Estimate:
        """Estimate one engine start."""
        anywhere = Place(0, "parity", "")
        started = self.measured.mean(anywhere, rates.engine_start, room=LEAST_SECONDS)
        started = started or next(
            (
                found
                for step in WRITTEN
                if (found := self.measured.mean(Place(0, step, ""), rates.engine_start, room=LEAST_SECONDS))
            ),
            None,
        )
        assumed = ASSUMED[f"engine start {self._writer}"]
        return Estimate(
            seconds=started or assumed.range,
            gpus=self._gpus,
            source=f"{START}: {self.measured.source() if started else assumed.source}",
        )

    def estimate(self, place: Place, rows: Range | None) -> Estimate:
        """Estimate a step that is to do."""
        if place.step in WRITTEN:
            return self._writing(place, rows)
        if place.step == "train":
            return self._training(place, rows)
        return self._small(place, rows)

    def _writing(self, place: Place, rows: Range | None) -> Estimate:
        if rows is None:
            return Estimate(source=self.sizes.source or "the sources aren't read yet")
        name = part(place.iteration) if place.step != "evaluate" else rates.suite_of(place.label)
        draws = 1.0 if self.config.method is Method.GENRM else self._draws(place)
        measured, notes = self.measured, []
        length = measured.length(place, rates.completion_tokens)
        if length is None:
            length = ASSUMED["length"].range.times(self.config.sample.max_tokens)
            notes.append(f"length: {ASSUMED['length'].source}")
        if self.config.method is Method.GENRM:
            length = Range.exactly(0)
        prompt = self.sizes.prompt_tokens.get(name)
        if not self.sizes.exact or prompt is None:
            prompt = measured.length(place, rates.prompt_tokens) or prompt
        tokens = rows.times(length)
        read = rows.times(1 / draws).times(prompt) if prompt else None
        share = ASSUMED[f"read {self._writer}"].range.value
        rate = measured.mean(place, rates.work_rate(share), room=LEAST_SECONDS)
        if rate is None:
            rate = self._by_size(ASSUMED[f"generate {self._writer}"].range, self._writer, gpus=self._gpus)
            notes.append(f"rate: {ASSUMED[f'generate {self._writer}'].source}")
            if rate is not None and self.config.engine.kind is EngineKind.TRANSFORMERS:
                rate = rate.times(ASSUMED["plain generate"].range)
                notes.append(ASSUMED["plain generate"].source)
        work = tokens.plus(read.times(share)) if read else tokens
        size = measured.mean(place, rates.bytes_a_row, room=LEAST_SECONDS)
        return Estimate(
            rows=rows,
            prompt_tokens=read,
            tokens=tokens,
            seconds=work.over(rate) if rate else None,
            gpus=self._gpus,
            bytes=rows.times(size) if size else tokens.times(ASSUMED["bytes a token"].range),
            source="; ".join(notes) or measured.source(),
        )

    def _draws(self, place: Place) -> float:
        """Count the completions of a prompt."""
        if place.step == "evaluate":
            first, _, last = place.label.rpartition(" ")[2].partition("–")
            return int(last) - int(first) + 1
        if place.step == "repair":
            return 1.0  # a prompt of its own each
        hinted = place.step == "rationalize" and self.config.method is not Method.STAR_RATIONALIZER
        return self.config.rationalize.n if hinted else self.config.sample.n

    def _by_size(self, rate: Range, machine: str, *, gpus: int) -> Range | None:
        """Scale a rate of the reference model on one device to this one and its GPUs; None where it isn't known."""
        if machine == "scripted":
            return rate
        reference = REFERENCE_GPU if machine == "gpu" else REFERENCE_CPU
        return rate.times(reference / self._parameters * max(gpus, 1)) if self._parameters else None

    def _training(self, place: Place, rows: Range | None) -> Estimate:
        if rows is None:
            return Estimate(source=self.sizes.source or "the sources aren't read yet")
        seen = Range(*(float(self._rows_seen(place, one)) for one in rows))
        measured, notes = self.measured, []
        each = None
        if measured.trains_like(self.config.method, place):
            each = measured.mean(place, rates.tokens_a_row, room=LEAST_TOKENS)
        if each is None:
            each = self._row_tokens(place)
            notes.append("length: prompts and completions as above")
        rate = measured.mean(place, rates.train_rate, room=LEAST_SECONDS)
        if rate is None:
            assumed = ASSUMED[f"train {self._trainer}"]
            rate = self._by_size(assumed.range, self._trainer, gpus=self._train_gpus)
            notes.append(f"rate: {assumed.source}")
        overhead = measured.mean(place, rates.train_overhead, room=LEAST_SECONDS)
        tokens = seen.times(each) if each else None
        around = overhead or (Range.exactly(0) if self._trainer == "scripted" else ASSUMED["trainer start"].range)
        return Estimate(
            rows=rows,
            tokens=tokens,
            seconds=tokens.over(rate).plus(around) if tokens and rate else None,
            gpus=self._train_gpus,
            bytes=self._checkpoint_bytes(),
            source="; ".join(notes) or measured.source(),
        )

    def _rows_seen(self, place: Place, rows: float) -> int:
        train = self.config.train
        if place.iteration == 0 and self.config.bootstrap:
            train = train.model_copy(update={"epochs": self.config.bootstrap.epochs or train.epochs, "max_steps": None})
        return cut_batches(train, max(round(rows), 1)).total

    def _row_tokens(self, place: Place) -> Range | None:
        """Give the tokens of a training row: a prompt and one completion or verdict, or both sides of a DPO row."""
        prompt = self.sizes.prompt_tokens.get(part(max(place.iteration, 1)))
        if self.config.method is Method.GENRM:
            return prompt.plus(ASSUMED["verdict"].range) if prompt else None
        written = Place(place.iteration, "sample", "")
        length = self.measured.length(written, rates.completion_tokens)
        length = length or ASSUMED["length"].range.times(self.config.sample.max_tokens)
        sides = 2 if self.config.method is Method.STAR_DPO and place.iteration else 1
        return prompt.plus(length).times(sides) if prompt else None

    def _checkpoint_bytes(self) -> Range | None:
        """Give the bytes of what is trained: all weights in bf16, or an adapter in fp32."""
        facts = find_facts(self.config.model) if self.config.train.kind == "trl" else None
        if facts is None:
            return None
        lora = self.config.train.lora
        return Range.exactly(4 * lora.r * facts.linear_width if lora else 2 * facts.parameters)

    def _small(self, place: Place, rows: Range | None) -> Estimate:
        """Estimate a step without generation or training by its like, else by its rows."""
        measured = self.measured
        came_in = self._came_in(place, rows)
        a_row = measured.mean(place, rates.seconds_a_row, room=LEAST_SECONDS) if came_in else None
        whole = measured.mean(place, rates.own_seconds, room=LEAST_SECONDS)
        size = measured.mean(place, rates.bytes_a_row, room=LEAST_SECONDS) if came_in else None
        stored = came_in.times(size) if came_in and size else None
        if a_row and came_in:
            return Estimate(rows, seconds=came_in.times(a_row), bytes=stored, source=measured.source())
        if whole:
            return Estimate(rows, seconds=whole, bytes=stored, source=measured.source())
        each = ASSUMED["a pair cut" if place.step == "split" else "a row"]
        seconds = ASSUMED["small step"].range
        if came_in:
            seconds = seconds.plus(came_in.times(each.range))
        return Estimate(rows, seconds=seconds, bytes=stored, source=each.source)

    def _came_in(self, place: Place, rows: Range | None) -> Range | None:
        if place.step == "split":
            pairs = sum(self.sizes.pairs.values())
            return self._room(Range.exactly(pairs)) if pairs else None
        return rows


def to_json(planned: Iterable[Planned], found: Forecast) -> dict[str, Any]:
    """Give a plan and its estimates in their JSON form, as a run freezes them."""
    return {"steps": [asdict(one) for one in planned], "forecast": found.to_json()}
