"""Turn training rows into token ids once, and check what will carry loss."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.errors import StepFailedError
from tasks.engines.template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from tasks.training.request import TrainRequest

_VERDICT = re.compile(r"\[\[[ \t]*[AB][ \t]*\]\]")


@dataclass(frozen=True)
class Rows:
    """Hold token ids: of the prompts as the engine gets them, and of each side (completion, or chosen and rejected).

    A side ends with the end of turn; exactly its tokens carry loss.
    """

    table: pa.Table
    prompts: list[list[int]]
    sides: Mapping[str, list[list[int]]]
    tokenizer: Any
    end_of_turn: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Count the tokens of each row's longest sequence."""
        prompts = np.array([len(ids) for ids in self.prompts])
        return np.asarray(prompts + np.max([_count(side) for side in self.sides.values()], axis=0), dtype=np.int64)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Count the tokens that the model reads for each row, all sides with their prompts."""
        prompts = np.array([len(ids) for ids in self.prompts])
        return np.asarray(sum(prompts + _count(side) for side in self.sides.values()), dtype=np.int64)

    @property
    def loss_tokens(self) -> NDArray[np.int64]:
        """Count the tokens that carry loss for each row."""
        return np.asarray(sum(_count(side) for side in self.sides.values()), dtype=np.int64)

    def example(self, row: int) -> dict[str, list[int]]:
        """Give the ids of a row by side: the prompt and what follows it."""
        return {side: self.prompts[row] + ids[row] for side, ids in self.sides.items()}


def _count(side: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.array([len(ids) for ids in side], dtype=np.int64)


def encode_rows(request: TrainRequest) -> Rows:
    """Encode all rows; StepFailedError for one that is too long or whose loss tokens lack verdict or end of turn."""
    template = ChatTemplate(request.start.base, request.template_kwargs)
    end = end_of_turn(template, request)
    names = ("completion",) if request.artifact == "sft" else ("chosen", "rejected")
    rows = Rows(
        table=request.rows,
        prompts=template.prompts(request.rows["prompt"].to_pylist()),
        sides={name: _encode(template.tokenizer, _texts(request.rows, name), end) for name in names},
        tokenizer=template.tokenizer,
        end_of_turn=end,
    )
    _check_lengths(rows, request.max_len)
    for name in names:
        _check_loss_tokens(rows, name)
    return rows


def _texts(table: pa.Table, side: str) -> list[str]:
    conversations = table[side].to_pylist()
    for pair, messages in zip(table["pair_id"].to_pylist(), conversations, strict=True):
        if [message["role"] for message in messages] != ["assistant"]:
            raise StepFailedError(f"pair {pair}: `{side}` must be one message of the assistant")
    return [messages[0]["content"] for messages in conversations]


def _encode(tokenizer: Any, texts: list[str], end: int) -> list[list[int]]:
    """Encode texts as the model writes them: what looks like a special token is plain text."""
    ids = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [[*one, end] for one in ids]


def end_of_turn(template: ChatTemplate, request: TrainRequest) -> int:
    """Find the token that the chat template puts after an answer; StepFailedError where the engine won't stop at it."""
    tokenizer = template.tokenizer
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, **dict(request.template_kwargs))
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    tail = tokenizer(text[text.rindex("yes") + 3 :], add_special_tokens=False)["input_ids"]
    found = next((token for token in tail if token in special), tokenizer.eos_token_id)
    if found is None or found not in _stops(request, tokenizer):
        raise StepFailedError(
            f"{request.start.base}: the chat template ends a turn with token {found}, "
            "at which generation does not stop; correct eos_token_id in generation_config.json"
        )
    return int(found)


def _stops(request: TrainRequest, tokenizer: Any) -> set[int]:
    from transformers import GenerationConfig

    stops = {tokenizer.eos_token_id}
    if (request.start.base / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(request.start.base, local_files_only=True).eos_token_id
        stops |= set(declared if isinstance(declared, list) else [declared])
    return stops


def _check_lengths(rows: Rows, max_len: int) -> None:
    lengths = rows.lengths
    if (over := lengths > max_len).any():
        pair = rows.table["pair_id"][int(lengths.argmax())].as_py()
        raise StepFailedError(
            f"train: {over.sum()} rows exceed model.max_len {max_len} (pair {pair} has {lengths.max()} tokens); "
            "they should have been dropped at the split as too_long"
        )


def _check_loss_tokens(rows: Rows, side: str) -> None:
    """Read back what carries loss; only a rejected side may lack a verdict."""
    ids = rows.sides[side]
    texts = rows.tokenizer.batch_decode([one[:-1] for one in ids], skip_special_tokens=False)
    pairs = rows.table["pair_id"].to_pylist()
    for pair, one, text in zip(pairs, ids, texts, strict=True):
        if side != "rejected" and not _VERDICT.search(text):
            raise StepFailedError(
                f"pair {pair}: the loss tokens of `{side}` hold no verdict [[A]] or [[B]]: {text[-80:]!r}"
            )
        if one[-1] != rows.end_of_turn or rows.end_of_turn in one[:-1]:
            raise StepFailedError(f"pair {pair}: the loss tokens of `{side}` do not end with the one end of turn")
