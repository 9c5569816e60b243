"""Say what an engine is: token ids in, texts and letter probabilities out, many requests in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from configs.run import FORCED_CHOICE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Say how completions are drawn."""

    n: int
    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """Ask for `sampling.n` completions of a prompt, for the probabilities of two letters, or for log-probs.

    Attributes:
        tag: the caller's name of the request; comes back with the response.
        ids: prompt token ids.
        model: digest of the model to ask; an engine may serve the base model and one adapter.
        sampling: draw completions, else None.
        letters: token ids of A and B: give their log-probs as the next token; with `sampling`, wherever a completion
            draws one of the two.
        scored: give the log-probs of the last `scored` prompt tokens.

    """

    tag: Any
    ids: Sequence[int]
    model: str
    sampling: Sampling | None = None
    letters: tuple[int, int] | None = None
    scored: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """Hold one completion.

    Attributes:
        text: what was written.
        finish_reason: stop or length.
        n_tokens: how many tokens were written.
        logprob: sum over its tokens, in nats.
        letters: log-probs of A and B by the text before them, where one of the two was drawn; an engine may give
            none.

    """

    text: str
    finish_reason: str
    n_tokens: int
    logprob: float | None
    letters: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    """Answer one request; `error` is set where the request can never succeed (a prompt that is too long)."""

    tag: Any
    texts: tuple[Text, ...] = ()
    letter_logprobs: tuple[float, float] | None = None
    logprobs: tuple[float, ...] = ()
    error: str | None = None


class Template(Protocol):
    """Turn messages and text into token ids, as the trainer does."""

    def prompts(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Render conversations with the generation prompt; one list of ids each."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode text without special tokens."""
        ...

    def letters(self, opening: str = "x [[", closing: str = "") -> tuple[int, int]:
        """Give the token ids of A and B between two texts."""
        ...


class Engine(Protocol):
    """Answer requests; add many, then poll until every tag came back."""

    template: Template
    capacity: int  # sequences worth keeping in flight
    pids: tuple[int, ...]  # processes of this start

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def poll(self) -> list[Response]:
        """Advance and give what finished; TransientError when the engine died."""
        ...

    def close(self) -> None:
        """Stop the engine and its processes."""
        ...


@dataclass(frozen=True)
class Served:
    """Name what an engine serves: a folder of whole weights and an adapter on it, each with its model digest."""

    base: Path
    base_digest: str
    adapter: Path | None = None
    adapter_digest: str | None = None


def too_long(request: Request, max_len: int) -> str | None:
    """Say why a request can never be answered within the token budget; None where it can."""
    written, most = (1, max_len + FORCED_CHOICE_TOKENS)
    if request.sampling:
        written, most = request.sampling.max_tokens, max_len
    if len(request.ids) + written > most:
        return f"prompt of {len(request.ids)} tokens and {written} to write exceed {most}"
    return None


def prob_a(letter_logprobs: tuple[float, float]) -> float:
    """Renormalise two log-probs: P(A) / (P(A) + P(B)), computed as a logistic so that it can't overflow."""
    a, b = letter_logprobs
    return 1.0 / (1.0 + math.exp(min(max(b - a, -700.0), 700.0)))
