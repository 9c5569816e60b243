"""Answer from a script: an engine without a model, for dry runs and tests; it ships with the product."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING

from tasks.engines.base import Message, Request, Response, Text

if TYPE_CHECKING:
    from collections.abc import Sequence


class ScriptedTemplate:
    """Take the UTF-8 bytes of the rendered chat as token ids."""

    def prompts(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Render conversations as `role: content` lines."""
        return [
            list("".join(f"{one['role']}: {one['content']}\n" for one in messages).encode())
            for messages in conversations
        ]

    def encode(self, text: str) -> list[int]:
        """Give the UTF-8 bytes."""
        return list(text.encode())

    def letters(self, opening: str = "x [[", closing: str = "") -> tuple[int, int]:
        """Give the bytes of A and B."""
        return ord("A"), ord("B")


class ScriptedEngine:
    """Judge by a hash of model and prompt: the same question to the same model gets the same answers.

    Of 16 answers about 7 say A, 7 say B, one has no verdict and one runs into the token limit.
    """

    pids: tuple[int, ...] = ()

    def __init__(self, capacity: int = 64) -> None:
        self.template = ScriptedTemplate()
        self.capacity = capacity
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._queue.append(request)

    def poll(self) -> list[Response]:
        """Answer one request."""
        return [_answer(self._queue.popleft())] if self._queue else []

    def close(self) -> None:
        """Forget what is queued."""
        self._queue.clear()


def _answer(request: Request) -> Response:
    digest = hashlib.sha256(request.model.encode() + bytes(request.ids)).digest()
    if request.letters and request.sampling is None:
        return Response(request.tag, letter_logprobs=(-digest[0] / 64, -digest[1] / 64))
    if request.sampling is None:
        return Response(request.tag, logprobs=tuple(-token / 256 for token in request.ids[-request.scored :]))
    return Response(request.tag, tuple(_text(digest, sample) for sample in range(request.sampling.n)))


def _text(digest: bytes, sample: int) -> Text:
    draw = hashlib.sha256(digest + sample.to_bytes(4, "big")).digest()
    kind = draw[0] % 16
    body = f"Response {'A' if kind < 7 else 'B'} answers the question more directly ({draw[1]})."
    if kind == 14:
        return Text(f"{body} Both are fine.", "stop", 12, -draw[2] / 8)
    if kind == 15:
        return Text(f"{body} To begin with", "length", 12, -draw[2] / 8)
    return Text(f"{body} [[{'A' if kind < 7 else 'B'}]]", "stop", 12, -draw[2] / 8)
