"""Watch transformers' `generate` while it writes: log-probs before any warping, letters, stop texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Watched:
    """Record each row's log-probs of what it drew, in nats, and those of two letters where one of them was drawn.

    It stands before temperature and top-p and changes nothing. `start` counts the padded prompt's tokens.
    """

    def __init__(self, start: int, letters: tuple[int, int] | None) -> None:
        self.logprobs: list[list[float]] = []
        self.letters: list[dict[int, tuple[float, float]]] = []  # row -> place of the drawn letter -> log-probs
        self._start, self._pair = start, list(letters or ())
        self._last: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take the log-probs of the next token; those of the last one are read off now that it is known."""
        self._read(input_ids)
        self._last = scores.float().log_softmax(-1)
        return scores

    def finish(self, ids: torch.Tensor) -> None:
        """Read off the last token; `ids` are all rows with their prompts."""
        self._read(ids)

    def _read(self, ids: torch.Tensor) -> None:
        if self._last is None:
            self.logprobs = [[] for _ in range(len(ids))]
            self.letters = [{} for _ in range(len(ids))]
            return
        drawn = ids[:, -1]
        place = ids.shape[1] - 1 - self._start
        chosen = self._last.gather(1, drawn[:, None])[:, 0].tolist()
        pairs = self._last[:, self._pair].tolist() if self._pair else []
        for row, (token, logprob) in enumerate(zip(drawn.tolist(), chosen, strict=True)):
            self.logprobs[row].append(logprob)
            if token in self._pair:
                self.letters[row][place] = (pairs[row][0], pairs[row][1])


class Stopped:
    """End a row where one of the stop texts stands; `ends` holds how many tokens such rows have written by then."""

    def __init__(self, start: int, stops: Sequence[str], decode: Callable[[list[int]], str], *, slack: int) -> None:
        self.ends: dict[int, int] = {}
        self._start, self._stops, self._decode = start, stops, decode
        self._tail = max((len(stop.encode()) for stop in stops), default=0) + slack

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Say of each row whether it has ended."""
        import torch

        written = input_ids.shape[1] - self._start
        if self._stops:
            for row, ids in enumerate(input_ids[:, -min(written, self._tail) :].tolist()):
                if row not in self.ends and any(stop in self._decode(ids) for stop in self._stops):
                    self.ends[row] = written
        ended = [row in self.ends for row in range(len(input_ids))]
        return torch.tensor(ended, device=input_ids.device)

    def cut(self, text: str) -> str:
        """Cut a text behind the stop text that stands first in it."""
        found = [text.index(stop) + len(stop) for stop in self._stops if stop in text]
        return text[: min(found, default=len(text))]
