"""See an iteration as a whole: its steps as a funnel, what the prompts came to, the judge's metrics, the gate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tasks import history
from tasks.report import Scores, read_scores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from storage.store import Store


@dataclass(frozen=True)
class Iteration:
    """Hold what an iteration did.

    steps: counts, share kept, drops by reason, tokens and seconds of each. prompts: of the pairs and orders asked, how
    many gave a training row and why the others did not. scores: metrics with 95 % intervals. gate: the reason it gave.
    """

    run: str
    iteration: int
    steps: Sequence[Mapping[str, Any]]
    prompts: Mapping[str, int]
    scores: Sequence[Scores]
    gate: str | None

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        return asdict(self)


def look_at_iteration(store: Store, run_id: str, iteration: int) -> Iteration:
    """Read an iteration; StoreError, saying which there are, where the run has no such iteration."""
    steps = history.iteration_steps(store, run_id, iteration)
    known = history.read_history(store, run_id)
    prompts: Mapping[str, int] = {}
    gate = None
    for used in known.used:
        if used.iteration != iteration or used.step not in ("pairs", "gate"):
            continue
        manifest = history.manifest_of(store, used)
        if manifest is not None and used.step == "pairs":
            prompts = manifest.facts["yields"]
        elif manifest is not None:
            gate = f"{manifest.facts['decision']}: {manifest.facts['reason']}"
    return Iteration(run_id, iteration, steps, prompts, read_scores(store, known, iteration), gate)
