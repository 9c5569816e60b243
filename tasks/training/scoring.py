"""Read a model's log-probs of completions, for the DPO reference and for the parity check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from storage.schema import SCHEMAS
from tasks.training.weights import on_cuda

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.training.rows import Rows

Ids = list[int]


def completion_logprobs(
    model: Any, prompts: Sequence[Ids], completions: Sequence[Ids], *, batch: int
) -> list[list[float]]:
    """Give the log-prob of each completion token, in nats and in the order of the rows; logits of no other token.

    Rows of like length share a batch of at most `batch`.
    """
    by_length = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]) - len(completions[row]))
    found: list[list[float]] = [[] for _ in prompts]
    training = model.training
    model.eval()
    for first in range(0, len(by_length), batch):
        rows = by_length[first : first + batch]
        scores = _score(model, [prompts[row] for row in rows], [completions[row] for row in rows])
        for row, score in zip(rows, scores, strict=True):
            found[row] = score
    model.train(training)
    return found


@torch.no_grad()
def _score(model: Any, prompts: list[Ids], completions: list[Ids]) -> list[list[float]]:
    whole = [torch.tensor(prompt + completion) for prompt, completion in zip(prompts, completions, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True).to(model.device)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in whole], batch_first=True).to(model.device)
    places = [
        (row, position)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        for position in range(len(prompt) - 1, len(prompt) + len(completion) - 1)
    ]
    rows, positions = torch.tensor(places, device=model.device).T
    first, last = int(positions.min()), int(positions.max())
    kept = torch.arange(first, last + 1, device=model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=on_cuda()):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=kept).logits
    logits = logits[rows, positions - first].float()
    chosen = ids[rows, positions + 1]
    scores = torch.log_softmax(logits, dim=-1).gather(1, chosen[:, None]).squeeze(1)
    return [part.tolist() for part in scores.split([len(completion) for completion in completions])]


def choose_probes(rows: Rows, count: int) -> list[int]:
    """Choose rows evenly over the table."""
    total = len(rows.prompts)
    return sorted({number * total // min(count, total) for number in range(min(count, total))})


def probe(model: Any, rows: Rows, chosen: list[int], *, batch: int) -> list[list[float]]:
    """Score the completions (SFT) or chosen sides (DPO) of chosen rows."""
    side = rows.sides[_side(rows)]
    return completion_logprobs(model, [rows.prompts[row] for row in chosen], [side[row] for row in chosen], batch=batch)


def probe_table(rows: Rows, chosen: list[int], *, start: list[list[float]], end: list[list[float]]) -> pa.Table:
    """Put the probes' token ids and log-probs, before and after training, into a table."""
    side = _side(rows)
    columns = {
        "pair_id": [rows.table["pair_id"][row].as_py() for row in chosen],
        "prompt": [rows.table["prompt"][row].as_py() for row in chosen],
        "ids": [rows.example(row)[side] for row in chosen],
        "completion_tokens": [len(rows.sides[side][row]) for row in chosen],
        "logprobs": end,
        "start_logprobs": start,
    }
    return pa.table(columns, schema=SCHEMAS["probes"])


def _side(rows: Rows) -> str:
    return "completion" if "completion" in rows.sides else "chosen"
