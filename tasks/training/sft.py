"""Fine-tune on right rationales with TRL's SFTTrainer (paper: STaR-SFT)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tasks.training import ranks
from tasks.training.observed import FILLER, Observed, with_rows

if TYPE_CHECKING:
    from tasks.training.observed import Course
    from tasks.training.rows import Rows

IGNORED = -100


class ObservedSFT(Observed, SFTTrainer):
    """SFTTrainer that is watched. Its loss is the mean over all loss tokens of the effective batch."""


def sft_trainer(policy: Any, course: Course) -> ObservedSFT:
    """Set up the trainer on rows that are already token ids."""
    trainer = ObservedSFT(
        model=policy,
        args=SFTConfig(**course.arguments()),
        train_dataset=Dataset.from_dict(_columns(course.rows)),
        processing_class=course.rows.tokenizer,
        # Masks come from lengths, never from the padding token, which may be the end of turn itself.
        data_collator=with_rows(DataCollatorForLanguageModeling(pad_token_id=pad_token(course.rows))),
    )
    trainer.follow(course)
    return trainer


def _columns(rows: Rows) -> dict[str, list[Any]]:
    pairs = list(zip(rows.prompts, rows.sides["completion"], strict=True))
    ids = [prompt + completion for prompt, completion in pairs]
    labels = [[IGNORED] * len(prompt) + completion for prompt, completion in pairs]
    numbers = list(range(len(pairs)))
    if ranks.count() > 1:
        ids, labels, numbers = [*ids, ids[0]], [*labels, [IGNORED] * len(ids[0])], [*numbers, FILLER]
    return {"input_ids": ids, "labels": labels, "row": numbers}


def pad_token(rows: Rows) -> int:
    """Give a token to pad with; where it stands nothing is read and nothing is learnt."""
    token = rows.tokenizer.pad_token_id
    return rows.end_of_turn if token is None else int(token)
