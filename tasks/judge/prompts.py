"""Word the judge's prompt: a frame from the configuration, filled with one pair as it is shown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from storage.digest import digest_json
from storage.schema import MESSAGE, MESSAGES, Order
from tasks.judge.draw import hash_bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from configs.run import PromptConfig, RunConfig, SampleOrder

# configs.run is imported where it is used: who only looks into data needs no description of a run.

VERSION = 1

Message = dict[str, str]

OPENING, CLOSING = "[[", "]]"  # of a verdict

_PLACEHOLDER = re.compile(r"\{(prompt|response_a|response_b)\}")
_LABELS = {"system": "System", "user": "User", "assistant": "Assistant"}


def conversation(messages: Sequence[Message]) -> str:
    """Write a pair's prompt as one text: a single user turn is its content, several turns are labelled paragraphs.

    Raises ValueError for a prompt without turns.
    """
    if not messages:
        raise ValueError("a pair's prompt has no turns; the split drops such pairs")
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return "\n\n".join(f"{_label(one['role'])}: {one['content']}" for one in messages)


def _label(role: str) -> str:
    return _LABELS.get(role, role.capitalize())


def worded(config: RunConfig) -> PromptConfig:
    """Give the wording of a run's judge; where it gives no reasons (genrm), few-shot examples show none."""
    from configs.run import Method

    if config.method is not Method.GENRM:
        return config.prompt
    shots = tuple(shot.model_copy(update={"rationale": ""}) for shot in config.prompt.few_shot)
    return config.prompt.model_copy(update={"few_shot": shots})


def judge_messages(
    config: PromptConfig, prompt: Sequence[Message] | str, response_a: str, response_b: str
) -> list[Message]:
    """Ask for a judgment of two responses, `response_a` being the one shown first.

    Text is put in literally and in one pass, so braces and placeholders inside a response survive. Few-shot examples
    stand before the question as turns of user and assistant, answered in the form that is trained.
    """
    messages = [{"role": "system", "content": config.system}] if config.system else []
    for shot in config.few_shot:
        question = _fill(config.user, shot.prompt, (shot.response_a, shot.response_b))
        messages.append({"role": "user", "content": question})
        reasons = f"{shot.rationale}\n\n" if shot.rationale else ""
        messages.append(completion_message(f"{reasons}{verdict_text(shot.verdict)}"))
    text = prompt if isinstance(prompt, str) else conversation(prompt)
    messages.append({"role": "user", "content": _fill(config.user, text, (response_a, response_b))})
    return messages


def _fill(template: str, prompt: str, responses: tuple[str, str]) -> str:
    values = {"prompt": prompt, "response_a": responses[0], "response_b": responses[1]}
    return _PLACEHOLDER.sub(lambda found: values[found[1]], template)


def render(pairs: pa.Table, orders: Sequence[str], config: PromptConfig) -> pa.Table:
    """Render the judge's prompt of every row of `pairs`, each in its order; give pair_id, order, prompt (messages)."""
    rows = zip(
        pairs.column("prompt").to_pylist(),
        pairs.column("response_a").to_pylist(),
        pairs.column("response_b").to_pylist(),
        orders,
        strict=True,
    )
    asked = (
        judge_messages(config, prompt, *((first, second) if order == Order.AB else (second, first)))
        for prompt, first, second, order in rows
    )
    columns = {
        "pair_id": pairs.column("pair_id"),
        "order": pa.array(list(orders), pa.large_string()),
        "prompt": message_array(asked),
    }
    return pa.table(columns)


def shown_order(seed: int, pair_ids: Sequence[str]) -> list[str]:
    """Pick the order each pair is shown in: a fair coin from SHA-256 of seed and pair id."""
    coins = hash_bits(seed, pair_ids, purpose="order") >> np.uint64(63)
    return [Order.BA.value if coin else Order.AB.value for coin in coins.tolist()]


def orders(order: SampleOrder, seed: int, pair_ids: Sequence[str]) -> dict[str, list[str]]:
    """Give the orders that each pair is shown in for training: the one of `shown_order`, or both."""
    from configs.run import SampleOrder

    if order is SampleOrder.BOTH:
        return {one: [str(Order.AB), str(Order.BA)] for one in pair_ids}
    return {one: [shown] for one, shown in zip(pair_ids, shown_order(seed, pair_ids), strict=True)}


def verdict_text(letter: str) -> str:
    """Write a verdict as the judge is asked to: `[[A]]`."""
    return f"{OPENING}{letter}{CLOSING}"


def completion_message(text: str) -> Message:
    """Make the assistant's turn."""
    return {"role": "assistant", "content": text}


def completion_column(texts: pa.Array) -> pa.Array:
    """Make a column of conversations that are one assistant's turn each."""
    return _messages(pa.repeat(pa.scalar("assistant", pa.large_string()), len(texts)), texts, range(len(texts) + 1))


def message_array(conversations: Iterable[Sequence[Message]]) -> pa.Array:
    """Make a column of conversations from lists of messages."""
    roles: list[str] = []
    contents: list[str] = []
    ends = [0]
    for messages in conversations:
        roles += [one["role"] for one in messages]
        contents += [one["content"] for one in messages]
        ends.append(len(roles))
    return _messages(pa.array(roles, pa.large_string()), pa.array(contents, pa.large_string()), ends)


def _messages(roles: pa.Array, contents: pa.Array, ends: Sequence[int]) -> pa.Array:
    turns = pa.StructArray.from_arrays([roles, contents], fields=list(MESSAGE))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), turns, type=MESSAGES)


def prompt_digest(config: PromptConfig) -> str:
    """Name a wording by its content and by the version of this module, for step keys."""
    from configs.run import key_part

    part: dict[str, Any] = {"version": VERSION, "prompt": key_part(config)}
    return digest_json(part)
