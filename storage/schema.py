"""Declare the Arrow schema and the words of every stored artifact."""

from __future__ import annotations

from enum import StrEnum

import pyarrow as pa

SCHEMA_VERSION = 1


class Order(StrEnum):
    """Say which response is shown first: `ab` as stored, `ba` swapped."""

    AB = "ab"
    BA = "ba"


class Status(StrEnum):
    """Class a judgment: unparsed, both and truncated are classes of their own, never wrong and never half right."""

    CORRECT = "correct"
    WRONG = "wrong"
    TIE = "tie"
    UNPARSED = "unparsed"
    BOTH = "both"
    TRUNCATED = "truncated"
    ERROR = "error"


class Split(StrEnum):
    """Name where a pair goes; the training parts are `part-1` … `part-n`."""

    DEV = "dev"
    TEST = "test"
    BOOTSTRAP = "bootstrap"
    DROPPED = "dropped"


def part(iteration: int) -> str:
    """Name the training part of a 1-based iteration."""
    return f"part-{iteration}"


MESSAGE = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
MESSAGES = pa.list_(MESSAGE)

# The five columns that name a judgment everywhere: lineage is a join on them.
JUDGMENT_ID: tuple[str, ...] = ("pair_id", "checkpoint", "order", "sample", "hinted")
_judgment_id = [
    ("pair_id", pa.large_string()),
    ("checkpoint", pa.large_string()),  # digest of the model that wrote the text
    ("order", pa.large_string()),  # Order: how the responses were shown
    ("sample", pa.int32()),  # 0-based draw
    ("hinted", pa.bool_()),  # the gold verdict was shown to the writer
]

SCHEMAS: dict[str, pa.Schema] = {
    "pairs": pa.schema(
        [
            ("pair_id", pa.large_string()),
            ("prompt", MESSAGES),
            ("response_a", pa.large_string()),
            ("response_b", pa.large_string()),
            ("gold", pa.large_string()),  # "A" | "B": the better response as stored (order ab)
            ("group", pa.large_string()),  # pairs of one group (one prompt) are never parted
            ("source", pa.large_string()),
            ("subset", pa.large_string()),
        ]
    ),
    "splits": pa.schema(
        [
            ("source", pa.large_string()),
            ("row", pa.int64()),  # 0-based row of the source, over all its files in order
            ("pair_id", pa.large_string()),  # null where the row is no pair
            ("split", pa.large_string()),  # Split or part-<i>
            ("reason", pa.large_string()),  # why dropped, else null
            ("detail", pa.large_string()),  # what exactly was found, else null
        ]
    ),
    "rationales": pa.schema(  # judgments of another source (the paper's Table 1), one per pair and order
        [
            ("pair_id", pa.large_string()),
            ("order", pa.large_string()),
            ("text", pa.large_string()),  # rationale and verdict, as the judge should write it
        ]
    ),
    "completions": pa.schema(
        [
            *_judgment_id,
            ("text", pa.large_string()),
            ("finish_reason", pa.large_string()),  # stop | length | error
            ("n_tokens", pa.int32()),
            ("logprob", pa.float64()),  # sum over the completion's tokens, nats
            ("prob_a", pa.float64()),  # P(A) / (P(A) + P(B)) after `[[`, letters as shown; null when not read
            ("error", pa.large_string()),  # deterministic error of this row, else null
        ]
    ),
    "choices": pa.schema(  # readings of a judge that gives no reasons: the letters right behind the prompt and `[[`
        [
            ("pair_id", pa.large_string()),
            ("checkpoint", pa.large_string()),
            ("order", pa.large_string()),
            ("prob_a", pa.float64()),  # P(A) / (P(A) + P(B)), letters as shown
            ("error", pa.large_string()),  # deterministic error of this row, else null
        ]
    ),
    "judgments": pa.schema(
        [
            *_judgment_id,
            ("verdict", pa.large_string()),  # letter as shown, else null
            ("status", pa.large_string()),  # Status, against gold mapped to the order shown
            ("rationale_end", pa.int32()),  # the rationale is text[:rationale_end] of the completion, in characters
            ("n_tokens", pa.int32()),
            ("prob_gold", pa.float64()),  # forced choice: probability of the gold letter, else null
        ]
    ),
    "selected": pa.schema([*_judgment_id, ("status", pa.large_string())]),
    "dropped": pa.schema([*_judgment_id, ("status", pa.large_string()), ("reason", pa.large_string())]),
    "sft": pa.schema([*_judgment_id, ("prompt", MESSAGES), ("completion", MESSAGES)]),
    "dpo": pa.schema(
        [
            ("pair_id", pa.large_string()),
            ("checkpoint", pa.large_string()),
            ("order", pa.large_string()),
            ("chosen_sample", pa.int32()),
            ("chosen_hinted", pa.bool_()),
            ("rejected_sample", pa.int32()),
            ("rejected_hinted", pa.bool_()),
            ("prompt", MESSAGES),
            ("chosen", MESSAGES),
            ("rejected", MESSAGES),
        ]
    ),
    "train_log": pa.schema(
        [
            ("train_step", pa.int32()),  # optimiser steps done
            ("epoch", pa.float64()),
            ("loss", pa.float64()),
            ("learning_rate", pa.float64()),
            ("grad_norm", pa.float64()),
            ("rows", pa.large_string()),  # digest of the row indices of this step's batches, in order
            ("extra", pa.large_string()),  # the trainer's other numbers, JSON
        ]
    ),
    "probes": pa.schema(  # some training rows with their log-probs, for the parity check of the next session
        [
            ("pair_id", pa.large_string()),
            ("prompt", MESSAGES),
            ("ids", pa.list_(pa.int32())),  # prompt and completion tokens
            ("completion_tokens", pa.int32()),
            ("logprobs", pa.list_(pa.float64())),  # of the completion's tokens under the trained model, nats
            ("start_logprobs", pa.list_(pa.float64())),  # the same under the model that training started from
        ]
    ),
    "metrics": pa.schema(
        [
            ("suite", pa.large_string()),
            ("subset", pa.large_string()),  # "" over all subsets
            ("section", pa.large_string()),  # "" where the suite has none
            ("metric", pa.large_string()),
            ("value", pa.float64()),  # null where undefined (n = 0)
            ("low", pa.float64()),
            ("high", pa.float64()),
            ("n", pa.int64()),  # pairs or judgments under the metric
            ("clusters", pa.int64()),  # groups they come from
        ]
    ),
    "pair_scores": pa.schema(  # one row a pair of a suite, for paired tests between checkpoints
        [
            ("suite", pa.large_string()),
            ("pair_id", pa.large_string()),
            ("group", pa.large_string()),
            ("subset", pa.large_string()),
            ("forced_choice", pa.float64()),  # mean over orders of 1[P(gold) > 1/2] (tie 1/2), majority of votes; 0…1
            ("free_text", pa.float64()),  # mean over orders of 1[majority verdict = gold] (none 0, tie 1/2)
            ("consistent", pa.bool_()),  # the same response wins in both orders (free text); null with one order
        ]
    ),
}


def empty(artifact: str) -> pa.Table:
    """Make a table of no rows of an artifact kind."""
    return SCHEMAS[artifact].empty_table()
