"""Say what a trainer is asked and what it gives back; imports no trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from configs.run import LORA_MIN_LEARNING_RATE, Method
from storage.errors import StepFailedError
from storage.schema import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pyarrow as pa

    from configs.run import TrainConfig

PROBES = 32  # rows whose log-probs go to the parity check


@dataclass(frozen=True)
class ModelFolder:
    """Point to local weights: a whole model, and an adapter on it or None."""

    base: Path
    adapter: Path | None = None


class StateStore(Protocol):
    """Keep the newest state of an unfinished training where another machine finds it; all raise StoreError."""

    def put(self, folder: Path, fields: Mapping[str, Any]) -> None:
        """Keep the files of a folder, safetensors and JSON, in place of those before."""
        ...

    def newest(self) -> Mapping[str, Any] | None:
        """Give the fields that were put last, None where there are none."""
        ...

    def fetch(self, folder: Path) -> None:
        """Bring what was put last into an empty folder."""
        ...


@dataclass(frozen=True)
class TrainRequest:
    """Ask for a training.

    Attributes:
        method: a `Method`: star-sft on rows of artifact `sft`, star-dpo on rows of `dpo`.
        rows: the training rows; their order has no influence but through the seed's permutation of row numbers.
        start: the weights to start from; an adapter is continued, never merged and never stacked.
        reference: DPO only: the model whose log-probs are the reference.
        max_len: most tokens of prompt + completion.
        seed: of the row order, the fresh adapter and dropout.
        template_kwargs: arguments of the chat template.
        work: local folder for the trainer state that an interrupted training resumes from.
        token: digest of what is trained; state of another token is removed, never resumed.
        out: folder that the checkpoint is written to; made anew.
        progress: told after each optimiser step: train_step, train_steps, loss, learning_rate, seconds, eta_seconds,
            tokens_per_second.
        remote: where state is kept beside `work`, None for there alone.
        warn: told one sentence where something failed that costs time only.

    """

    method: str
    rows: pa.Table
    start: ModelFolder
    reference: ModelFolder | None
    config: TrainConfig
    max_len: int
    seed: int
    template_kwargs: Mapping[str, Any]
    work: Path
    token: str
    out: Path
    progress: Callable[[Mapping[str, Any]], None]
    remote: StateStore | None = None
    warn: Callable[[str], None] = print

    @property
    def artifact(self) -> str:
        """Name the kind of rows: sft or dpo."""
        return "dpo" if self.method == Method.STAR_DPO else "sft"


@dataclass(frozen=True)
class TrainResult:
    """Hold a trained checkpoint: its folder, the tables `train_log` and `probes`, and facts for the manifest."""

    folder: Path
    train_log: pa.Table
    probes: pa.Table
    facts: dict[str, Any]


def check_request(request: TrainRequest) -> None:
    """Refuse what can't be trained, before any model is loaded; StepFailedError."""
    config, schema = request.config, SCHEMAS[request.artifact]
    if request.rows.num_rows == 0:
        raise StepFailedError(
            f"train: there are no {request.artifact} rows to train on; see the funnel of select and pairs"
        )
    if set(schema.names) - set(request.rows.column_names):
        missing = sorted(set(schema.names) - set(request.rows.column_names))
        raise StepFailedError(f"train: the {request.artifact} rows lack the columns {', '.join(missing)}")
    if request.artifact == "dpo" and request.reference is None:
        raise StepFailedError("train: DPO needs a reference model; set train.reference to base or previous")
    if config.kind == "scripted":
        return
    if config.lora is None and request.start.adapter is not None:
        raise StepFailedError(
            f"{request.start.adapter}: all weights can't be trained from an adapter, which is never merged; "
            "set train.lora, or train.init_from to base"
        )
    if config.lora is not None and config.learning_rate < LORA_MIN_LEARNING_RATE:
        raise StepFailedError(
            f"train.learning_rate: {config.learning_rate:g} moves all weights, but not an adapter; "
            f"with train.lora give {LORA_MIN_LEARNING_RATE:g} or more (1e-4 is usual)"
        )
