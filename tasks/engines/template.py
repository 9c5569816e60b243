"""Render chats to token ids with the model's own tokenizer and chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storage.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tasks.engines.base import Message


class ChatTemplate:
    """Wrap a tokenizer folder; dates and thinking flags come from the pinned template arguments."""

    def __init__(self, folder: Path, kwargs: Mapping[str, Any]) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        self._kwargs = dict(kwargs)
        if not self.tokenizer.chat_template:
            raise DataError(f"{folder}: the tokenizer has no chat template; use an instruction-tuned model")

    def prompts(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Render conversations with the generation prompt; the template writes the only BOS there is."""
        if not conversations:
            return []
        texts = self.tokenizer.apply_chat_template(
            [list(one) for one in conversations], tokenize=False, add_generation_prompt=True, **self._kwargs
        )
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    def encode(self, text: str) -> list[int]:
        """Encode text without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def letters(self, opening: str = "x [[", closing: str = "") -> tuple[int, int]:
        """Give the token ids of A and B between two texts; DataError where a letter is no token of its own there."""
        before = self.encode(opening)
        found = []
        for letter in "AB":
            ids = self.encode(f"{opening}{letter}")
            whole = self.encode(f"{opening}{letter}{closing}")
            if len(ids) != len(before) + 1 or ids[:-1] != before or whole[: len(ids)] != ids:
                raise DataError(
                    f"{self.tokenizer.name_or_path}: `{letter}` in `[[{letter}]]` is not one token of this tokenizer; "
                    "the forced choice can't be read, choose another model"
                )
            found.append(ids[-1])
        return found[0], found[1]
