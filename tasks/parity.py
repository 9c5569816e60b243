"""Check that the engine serves the weights that were trained, prompted as they were trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.run import RunConfig, key_part
from storage.errors import StepFailedError
from tasks.engines.base import Engine, Request
from tasks.step import Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from storage.manifest import Manifest
    from tasks.models import Model

VERSION = 1
TOLERANCE = 0.25  # nats a token, mean over the probes: bf16 engines differ from the trainer by hundredths
ROOM = 0.5  # the engine is at most this share as far from the trained model as from the one it started from


@dataclass(frozen=True)
class Parity:
    """Hold the check: distances are mean absolute differences of a token's log-prob, in nats."""

    probes: int
    to_trained: float
    to_start: float

    @property
    def problem(self) -> str | None:
        """Say what is wrong, or None."""
        if self.to_trained > TOLERANCE:
            return f"log-probs differ by {self.to_trained:.3f} nats a token from the trainer's (at most {TOLERANCE})"
        if self.to_trained > ROOM * self.to_start:
            gaps = f"{self.to_start:.3f} nats a token away, the trained {self.to_trained:.3f}"
            return f"log-probs are too near to the start model's: {gaps}"
        return None


def parity_step(config: RunConfig, train: Manifest, model: Model) -> Step:
    """Name the step by the probes that training stored and the engine's settings."""
    parts = {"engine": key_part(config.engine), "template_kwargs": config.model.template_kwargs}
    return Step("parity", VERSION, {"probes": train.artifacts["probes"].digest, "model": model.digest}, parts)


def check_parity(probes: pa.Table, engine: Engine, model: Model) -> dict[str, Any]:
    """Compare ids and log-probs of the stored probes; StepFailedError where engine and trainer disagree.

    Run before anything else is asked of the engine: it drains it.
    """
    rows = probes.to_pylist()
    for number, (row, ids) in enumerate(
        zip(rows, engine.template.prompts([row["prompt"] for row in rows]), strict=True)
    ):
        if ids != row["ids"][: len(ids)] or len(ids) != len(row["ids"]) - row["completion_tokens"]:
            raise StepFailedError(
                f"parity: the engine's token ids of pair {row['pair_id']} differ from the trainer's; "
                "tokenizer or chat template of checkpoint and engine are not the same"
            )
        engine.add(Request(number, row["ids"], model.digest, scored=row["completion_tokens"]))
    found: dict[int, Sequence[float]] = {}
    while len(found) < len(rows):
        for response in engine.poll():
            found[response.tag] = response.logprobs
    parity = compare(
        [found[number] for number in range(len(rows))],
        [row["logprobs"] for row in rows],
        [row["start_logprobs"] for row in rows],
    )
    if parity.problem:
        raise StepFailedError(
            f"parity of model {model.digest[:12]}: {parity.problem}; the engine does not serve what was trained"
        )
    return {
        "counts": {},
        "facts": {"probes": parity.probes, "to_trained": parity.to_trained, "to_start": parity.to_start},
    }


def compare(
    engine: Sequence[Sequence[float]], trained: Sequence[Sequence[float]], start: Sequence[Sequence[float]]
) -> Parity:
    """Measure how far the engine's log-probs are from the trained and from the start model's."""

    def distance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
        gaps = [abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
        return sum(gaps) / max(len(gaps), 1)

    return Parity(len(engine), distance(engine, trained), distance(engine, start))
