"""Read off an earlier run's manifests how long its texts were and how fast its steps went."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from configs.run import Method
from tasks.earlier import Place
from tasks.estimate import LEAST_TOKENS, Range
from tasks.step import software

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from configs.run import RunConfig
    from storage.manifest import Manifest

FOR_TRAINING = ("sample", "repair", "rationalize")  # an iteration's, written by the checkpoint before it
WRITTEN = ("evaluate", *FOR_TRAINING)
ELSEWHERE = 0.6  # room of a rate that was measured on another machine


def suite_of(label: str) -> str:
    """Name the suite of an evaluation's or a score's label: `base test ab votes 1–8` is of `test`."""
    return label.removeprefix("base ").split(" ")[0]


@dataclass(frozen=True)
class Measured:
    """Hold the manifests of an earlier run of the same engine, trainer and base model; empty where there is none.

    `texts` are those of what was written, by the same kind of engine: another dtype writes as long texts, not as fast.
    """

    run_id: str = ""
    manifests: Mapping[Place, Manifest] = field(default_factory=dict)
    method: Method | None = None
    texts: Mapping[Place, Manifest] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, run_id: str, then: RunConfig, manifests: Mapping[Place, Manifest]) -> Measured:
        """Take a run's manifests as far as they tell something of a run of `config`."""
        same = _writer(config) == _writer(then), _trainer(config) == _trainer(then)
        kept = {
            place: one
            for place, one in manifests.items()
            if (same[0] or place.step not in (*WRITTEN, "parity")) and (same[1] or place.step != "train")
        }
        alike = (config.engine.kind, config.model.base) == (then.engine.kind, then.model.base)
        texts = {place: one for place, one in manifests.items() if alike and place.step in WRITTEN}
        return cls(run_id, kept, then.method, texts)

    def mean(self, place: Place, measure: Callable[[Manifest], float | None], *, room: float) -> Range | None:
        """Give a measure of the step in the same place, with the spread of its like; else the mean of its like.

        Its like are the steps of the same name and suite, else of the same name, else all that write. `room` is the
        least share on either side; a machine other than this one gets more.
        """
        for level in self._levels(place):
            found = {at: value for at, one in level if (value := measure(one)) is not None}
            if not found:
                continue
            value = found.get(place, sum(found.values()) / len(found))
            if any(not _here(one) for _, one in level):
                room = max(room, ELSEWHERE)
            return Range(value, min(*found.values(), value), max(*found.values(), value)).widened(room)
        return None

    def length(self, place: Place, measure: Callable[[Manifest], float | None]) -> Range | None:
        """Give a length as `mean` gives a measure."""
        return replace(self, manifests=self.texts or self.manifests).mean(place, measure, room=LEAST_TOKENS)

    def _levels(self, place: Place) -> Iterator[list[tuple[Place, Manifest]]]:
        of_name = [(at, one) for at, one in self.manifests.items() if at.step == place.step]
        if place.step in ("evaluate", "score"):
            yield [(at, one) for at, one in of_name if suite_of(at.label) == suite_of(place.label)]
        if place.step == "train":  # a warm start has other rows
            yield [(at, one) for at, one in of_name if (at.iteration > 0) == (place.iteration > 0)]
        yield of_name
        if place.step in WRITTEN:
            yield [(at, one) for at, one in self.manifests.items() if at.step in WRITTEN]

    def trains_like(self, method: Method, place: Place) -> bool:
        """Say whether its training rows are of the same kind: verdicts, two sides (but for a warm start) or one."""
        kinds = [Method.GENRM] if place.iteration == 0 else [Method.GENRM, Method.STAR_DPO]
        return all((self.method is kind) == (method is kind) for kind in kinds)

    def source(self) -> str:
        """Say where measures come from."""
        return f"measured in {self.run_id}"


def _writer(config: RunConfig) -> tuple[object, ...]:
    engine = config.engine
    return engine.kind, engine.dtype, engine.quantization, engine.tensor_parallel, config.model.base


def _trainer(config: RunConfig) -> tuple[object, ...]:
    return config.train.kind, config.train.lora is None, config.train.processes, config.model.base


def _here(manifest: Manifest) -> bool:
    """Say whether a manifest was made on a machine like this one."""
    then, now = manifest.facts.get("host"), software()["host"]
    return then is None or {"gpus": [], **then} == now


# ---- what a manifest says; None where it says nothing


def completion_tokens(manifest: Manifest) -> float | None:
    """Give the mean tokens of a completion."""
    written = _completions(manifest)
    return float(manifest.facts["tokens"]) / written if written else None


def _completions(manifest: Manifest) -> int | None:
    facts = manifest.facts
    if "completions" in facts:
        return int(facts["completions"]) or None
    if "tokens" in facts and not facts.get("reused_shards"):
        return int(manifest.counts["in"]) or None
    return None


def prompt_tokens(manifest: Manifest) -> float | None:
    """Give the mean tokens of a prompt that was asked."""
    facts = manifest.facts
    return float(facts["prompt_tokens"]) / facts["prompts"] if facts.get("prompts") else None


def work_rate(read: float) -> Callable[[Manifest], float | None]:
    """Give a measure: work a second, where a token read is so much work and a token written 1."""

    def measure(manifest: Manifest) -> float | None:
        facts = manifest.facts
        work = facts.get("tokens", 0) + read * facts.get("prompt_tokens", 0)
        return work / facts["seconds"] if facts.get("seconds") and work else None

    return measure


def engine_start(manifest: Manifest) -> float | None:
    """Give the seconds of the engine start that a step ran in."""
    found: float | None = manifest.facts.get("engine", {}).get("start_seconds")
    return found


def own_seconds(manifest: Manifest) -> float | None:
    """Give the seconds of a step without the engine start that a parity check waits for."""
    seconds: float | None = manifest.facts.get("seconds")
    if seconds is not None and manifest.step == "parity":
        return max(seconds - (engine_start(manifest) or 0.0), 0.0)
    return seconds


def seconds_a_row(manifest: Manifest) -> float | None:
    """Give the seconds of a row that came in."""
    seconds, rows = own_seconds(manifest), manifest.counts.get("in")
    return float(seconds / rows) if seconds is not None and rows else None


def row_yield(manifest: Manifest) -> float | None:
    """Give the new training rows of a prompt that was asked."""
    asked = manifest.facts.get("yields", {}).get("asked")
    return float(manifest.facts["fresh"]) / asked if asked else None


def trained_tokens(manifest: Manifest) -> float | None:
    """Give the tokens of all rows that a trainer saw."""
    facts = manifest.facts
    if facts.get("resumed_at") or "train_seconds" not in facts:
        return None
    return float(facts["tokens_per_second"] * facts["train_seconds"])


def tokens_a_row(manifest: Manifest) -> float | None:
    """Give the tokens of a row that a trainer saw."""
    tokens, seen = trained_tokens(manifest), manifest.facts.get("rows_seen")
    return tokens / seen if tokens and seen else None


def train_rate(manifest: Manifest) -> float | None:
    """Give the tokens trained a second, loading and storing left out."""
    found: float | None = manifest.facts.get("tokens_per_second")
    return found


def train_overhead(manifest: Manifest) -> float | None:
    """Give the seconds of a training beside its steps: loading, probing, storing."""
    facts = manifest.facts
    if "train_seconds" not in facts or facts.get("seconds") is None:
        return None
    return max(float(facts["seconds"] - facts["train_seconds"]), 0.0)


def stored_bytes(manifest: Manifest) -> int:
    """Give the bytes of a step's tables."""
    return sum(file.bytes for one in manifest.artifacts.values() for file in one.files)


def bytes_a_row(manifest: Manifest) -> float | None:
    """Give the bytes of a row that came in."""
    rows = manifest.counts.get("in")
    return stored_bytes(manifest) / rows if rows else None


def broken_share(manifests: Mapping[Place, Manifest], statuses: Collection[str]) -> Range | None:
    """Give the share of an iteration's completions that were mended, else of those dropped with these statuses."""
    shares = [
        manifest.counts["in"] / manifests[sampled].counts["in"]
        for place, manifest in manifests.items()
        if place.step == "repair" and (sampled := Place(place.iteration, "sample", "")) in manifests
    ]
    if not shares:
        selected = [one.counts for place, one in manifests.items() if place.step == "select" and one.counts["in"]]
        shares = [sum(one["dropped"].get(status, 0) for status in statuses) / one["in"] for one in selected]
    return Range(sum(shares) / len(shares), min(shares), max(shares)) if shares else None


def failed_share(manifests: Mapping[Place, Manifest]) -> Range | None:
    """Give the share of an iteration's prompts that no completion got right: asked again with the answer shown."""
    shares = []
    for place, manifest in manifests.items():
        sampled = manifests.get(Place(place.iteration, "sample", ""))
        if place.step != "rationalize" or sampled is None:  # a rationalizer's is asked of every pair
            continue
        prompts, again = sampled.facts.get("prompts"), manifest.facts.get("prompts")
        if prompts and again is not None:
            shares.append(again / prompts)
    return Range(sum(shares) / len(shares), min(shares), max(shares)) if shares else None
