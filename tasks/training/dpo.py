"""Prefer right rationales to wrong ones with TRL's DPOTrainer (paper: STaR-DPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from peft import PeftModel
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from tasks.training import ranks
from tasks.training.observed import FILLER, Observed, with_rows
from tasks.training.scoring import completion_logprobs
from tasks.training.sft import pad_token
from tasks.training.weights import load_frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tasks.training.observed import Course
    from tasks.training.request import ModelFolder
    from tasks.training.rows import Rows

SIDES = ("chosen", "rejected")


class ObservedDPO(Observed, DPOTrainer):
    """DPOTrainer that is watched, on rows that are already token ids with reference log-probs of our own."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset

    def loss_tokens(self, inputs: Mapping[str, Any]) -> int:
        """Count the completion tokens of both sides."""
        return int(inputs["completion_mask"][:, 1:].sum())

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Remember how many rows the step has, over all its parts."""
        samples, items = super().get_batch_samples(epoch_iterator, *args, **kwargs)
        rows = sum(int((part["rows"] != FILLER).sum()) for part in samples)
        self._mean_part = sum(ranks.gather(rows)) / max(len(samples) * ranks.count(), 1)
        return samples, items

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Weigh each part of a step by its rows: TRL takes the mean of means, and parts may be short or empty."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * (self.part_rows / self._mean_part)


def dpo_trainer(policy: Any, course: Course) -> ObservedDPO:
    """Set up the trainer; with `nll_weight` the SFT loss on the chosen side is added (RAM, Iterative RPO)."""
    config = course.request.config
    adapter = isinstance(policy, PeftModel)
    trainer = ObservedDPO(
        model=policy,
        args=DPOConfig(
            **course.arguments(),
            beta=config.beta,
            loss_type=["sigmoid", "sft"] if config.nll_weight else ["sigmoid"],
            loss_weights=[1.0, config.nll_weight] if config.nll_weight else None,
            precompute_ref_log_probs=not adapter,  # keeps TRL from loading a reference; it hashes all weights for it
            disable_dropout=not adapter,  # an adapter's dropout is a setting of ours
        ),
        train_dataset=Dataset.from_dict(_columns(course)),
        processing_class=course.rows.tokenizer,
        data_collator=with_rows(DataCollatorForPreference(pad_token_id=pad_token(course.rows))),
    )
    trainer.precompute_ref_logps = True
    if ranks.count() > 1:
        trainer.accelerator.gather = _gather
    if adapter and "ref" in policy.peft_config:
        policy.delete_adapter("ref")  # TRL's copy of the start; the reference is what the config says
    trainer.follow(course)
    return trainer


def _columns(course: Course) -> dict[str, list[Any]]:
    rows, reference = course.rows, course.request.reference
    assert reference is not None, "check_request asks for it"
    logprobs = reference_logprobs(rows, reference, batch=course.batches.micro)
    columns: dict[str, list[Any]] = {
        "prompt_ids": rows.prompts,
        **{f"{side}_ids": rows.sides[side] for side in SIDES},
        **{f"ref_{side}_logps": logprobs[side] for side in SIDES},
        "row": list(range(len(rows.prompts))),
    }
    if ranks.count() > 1:
        columns = {name: [*values, values[0]] for name, values in columns.items()}
        columns["row"][-1] = FILLER
    return columns


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    """Join what processes hold, of any length: accelerate's own way wants equal ones, and parts may differ."""
    found: torch.Tensor = torch.cat([torch.atleast_1d(one) for one in ranks.gather(tensor.detach().cpu())])
    return found.to(tensor.device)


def reference_logprobs(rows: Rows, reference: ModelFolder, *, batch: int) -> dict[str, list[float]]:
    """Sum each side's log-probs under the reference model, once, in nats; processes share the rows."""
    model, mine = load_frozen(reference), slice(ranks.rank(), None, ranks.count())
    found = {}
    for side in SIDES:
        scored = completion_logprobs(model, rows.prompts[mine], rows.sides[side][mine], batch=batch)
        shares = ranks.gather([float(sum(one)) for one in scored])
        found[side] = [shares[row % len(shares)][row // len(shares)] for row in range(len(rows.prompts))]
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found
