"""Watch a TRL trainer: what it really saw, losses that are no numbers, state that is whole before it counts."""

from __future__ import annotations

import json
import math
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback

from storage.errors import StepFailedError
from storage.schema import SCHEMAS
from tasks.training import ranks
from tasks.training.order import deal, digest_rows, merge_seen
from tasks.training.weights import on_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tasks.training.order import Batches
    from tasks.training.remote import Mirror
    from tasks.training.request import TrainRequest
    from tasks.training.rows import Rows

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
FILLER = -1  # number of the row that stands in where a process has none to train
_OURS = ("loss", "learning_rate", "grad_norm", "epoch", "step", "rows", "row_count", "loss_tokens")


@dataclass(frozen=True)
class Course:
    """Hold what a training follows: the encoded rows, their order, the batch sizes, and where its state is kept."""

    request: TrainRequest
    rows: Rows
    batches: Batches
    order: NDArray[np.int64]
    mirror: Mirror

    def arguments(self) -> dict[str, Any]:
        """Give the settings that SFT and DPO share, in TRL's words."""
        config, batches, cuda = self.request.config, self.batches, on_cuda()
        return {
            "output_dir": str(self.mirror.state.folder),
            "max_length": None,  # rows are checked; TRL's own limit of 1024 would cut the verdict off
            "per_device_train_batch_size": batches.micro,
            "gradient_accumulation_steps": batches.accumulation,
            "num_train_epochs": 1,  # the order holds all epochs
            "learning_rate": config.learning_rate,
            "lr_scheduler_type": _SCHEDULES[config.schedule],
            # The first warm-up step has rate 0: a training of one step must not be all warm-up.
            "warmup_steps": min(math.ceil(batches.steps * config.warmup), batches.steps - 1),
            "weight_decay": config.weight_decay,
            "adam_beta1": config.adam_beta1,
            "adam_beta2": config.adam_beta2,
            "max_grad_norm": config.max_grad_norm,
            "optim": "adamw_torch_fused",
            "seed": self.request.seed,
            "use_cpu": not cuda,
            "bf16": cuda,
            "gradient_checkpointing": cuda,
            "logging_steps": 1,
            "logging_nan_inf_filter": False,  # it would log the mean of earlier losses in place of a NaN
            "save_strategy": "no" if config.resume == "off" else "steps",
            "save_steps": config.save_every,
            "report_to": "none",
            "disable_tqdm": True,
            "remove_unused_columns": False,
            "dataloader_pin_memory": cuda,
            "ddp_find_unused_parameters": False,
        }

    def train_log(self, history: list[dict[str, Any]]) -> pa.Table:
        """Make the table of the trainer's own log, one row an optimiser step."""
        entries = [entry for entry in history if "rows" in entry]
        seen = [min(entry["step"] * self.batches.batch, self.batches.total) for entry in entries]
        extra = [{name: value for name, value in entry.items() if name not in _OURS} for entry in entries]
        columns = {
            "train_step": [entry["step"] for entry in entries],
            "epoch": [rows / self.request.rows.num_rows for rows in seen],
            **{name: [entry.get(name) for entry in entries] for name in ("loss", "learning_rate", "grad_norm", "rows")},
            "extra": [json.dumps(numbers, sort_keys=True) for numbers in extra],
        }
        return pa.table(columns, schema=SCHEMAS["train_log"])


class Observed:
    """Mix into a TRL trainer, before it: feed it the given order and record what its losses were made of."""

    course: Course

    def follow(self, course: Course) -> None:
        """Take the course; call once, before `train`."""
        self.course = course
        self._seen: list[int] = []
        self.part_rows = 0  # of the part that is trained now; a part that only keeps step with the others has none
        self._seen_tokens = 0
        self.remove_callback(PrinterCallback)  # type: ignore[attr-defined]
        self.add_callback(_Progress(course))  # type: ignore[attr-defined]

    def _get_train_sampler(self, train_dataset: Any = None) -> list[int]:
        order: list[int] = self.course.order.tolist()
        return order

    def get_train_dataloader(self) -> Any:
        """Give this process its own parts of every step; the libraries would repeat rows to make the last one even."""
        course, processes = self.course, ranks.count()
        if processes == 1:
            return super().get_train_dataloader()  # type: ignore[misc]
        filler = len(course.rows.prompts)  # the row behind the last one, which carries no loss
        mine = [
            course.order[part].tolist() or [filler]
            for step in range(course.batches.steps)
            for part in deal(course.batches, step, processes=processes)[ranks.rank()]
        ]
        return DataLoader(
            self.train_dataset,  # type: ignore[attr-defined]
            batch_sampler=mine,
            collate_fn=self.data_collator,  # type: ignore[attr-defined]
            pin_memory=on_cuda(),
        )

    def loss_tokens(self, inputs: Mapping[str, Any]) -> int:
        """Count the tokens of a batch that carry loss."""
        return int(inputs["labels"][:, 1:].ne(-100).sum())

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record rows and loss tokens of a batch; StepFailedError when its loss is no number."""
        rows = [row for row in inputs.pop("rows").tolist() if row != FILLER]
        self.part_rows = len(rows)
        self._seen += rows
        self._seen_tokens += self.loss_tokens(inputs) if rows else 0
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if not torch.isfinite(loss):
            step = self.state.global_step + 1  # type: ignore[attr-defined]
            rows = sorted(set(self._seen))[:8]
            raise StepFailedError(
                f"train: the loss of train step {step} is {loss.item()}; "
                f"lower train.learning_rate, or look at the rows {rows} of {self.course.request.artifact}"
            )
        return loss

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add what the step saw to the trainer's own numbers, which a resumed training takes up again."""
        if "loss" in logs:
            seen = self._seen_by_all()
            logs |= {
                "rows": digest_rows(seen),
                "row_count": len(seen),
                "loss_tokens": sum(ranks.gather(self._seen_tokens)),
            }
            self._seen, self._seen_tokens = [], 0
        super().log(logs, start_time)  # type: ignore[misc]

    def _seen_by_all(self) -> list[int]:
        """Give the rows of the step that ends now, over all processes, in the order that one would see them."""
        if ranks.count() == 1:
            return self._seen
        step = self.state.global_step - 1  # type: ignore[attr-defined]
        return merge_seen(deal(self.course.batches, step, processes=ranks.count()), ranks.gather(self._seen))

    def _save(self, output_dir: str, state_dict: Any = None) -> None:
        """Save weights only: the library adds tokenizer, cards and a pickle of its arguments."""
        self.model.save_pretrained(output_dir, state_dict=state_dict)  # type: ignore[attr-defined]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step  # type: ignore[attr-defined]
        if ranks.rank() == 0:
            shutil.rmtree(Path(self.course.mirror.state.folder) / f"checkpoint-{step}", ignore_errors=True)
        ranks.wait()
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        ranks.wait()
        if ranks.rank() == 0:
            self.course.mirror.state.complete(step)
            self.course.mirror.saved(step)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card."""

    def _send_telemetry(self) -> None:
        """Tell nobody."""


class _Progress(TrainerCallback):
    """Tell the caller each step; save nothing at the very end, where the weights themselves are saved."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._first: int | None = None
        self._started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._first, self._started = state.global_step, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self._course.batches.steps:
            control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "rows" not in logs or self._first is None:
            return
        batches, done = self._course.batches, state.global_step
        seconds = time.monotonic() - self._started
        trained = self._course.order[self._first * batches.batch : done * batches.batch]
        self._course.request.progress(
            {
                "train_step": done,
                "train_steps": batches.steps,
                "loss": logs["loss"],
                "learning_rate": logs["learning_rate"],
                "seconds": seconds,
                "eta_seconds": seconds / (done - self._first) * (batches.steps - done),
                "tokens_per_second": int(self._course.rows.tokens[trained].sum()) / max(seconds, 1e-9),
            }
        )


def with_rows(
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Let a TRL collator pass the row numbers on, so that what was trained is recorded and not assumed."""

    def collated(examples: list[dict[str, Any]]) -> dict[str, Any]:
        return {**collate(examples), "rows": torch.tensor([example["row"] for example in examples])}

    return collated


@contextmanager
def completion_logits() -> Iterator[None]:
    """Let TRL compute logits of the tokens that carry loss only, on a CPU too.

    TRL leaves out the prompts' logits where it has Triton kernels. On a CPU its plain path does the same when told so;
    with prompts of 70 tokens and a vocabulary of 49k that is 1.7 times the speed, at equal losses (a test).
    """
    from trl.trainer import utils

    asked = getattr(utils, "_use_triton", None)
    if asked is None:
        yield
        return
    utils._use_triton = lambda device: True
    try:
        yield
    finally:
        utils._use_triton = asked
