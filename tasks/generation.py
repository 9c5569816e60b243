"""Write the completions of one step: requests stream in, shards are committed as they finish."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage.schema import SCHEMAS
from tasks.engines.base import Engine, Request, Response, Sampling, Text, prob_a
from tasks.judge import hints, prompts
from tasks.judge.verdict import rationale_end
from tasks.step import Context, Event, Step, software

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from storage.manifest import Manifest
    from storage.store import Store


@dataclass(frozen=True)
class Questions:
    """Hold what is asked: rows of `pairs` sorted by id, the orders each is shown in, how completions are drawn.

    `forced_choice` reads P(A) against P(B) after `[[`, following each completion's own rationale. Without `sampling`
    nothing is written: P(A) against P(B) is read right behind the prompt and `[[`. A `hint` shows the answer.
    """

    pairs: pa.Table
    orders: Mapping[str, Sequence[str]]  # pair id -> orders shown
    sampling: Sampling | None
    model: str
    forced_choice: bool
    shard_pairs: int
    first_sample: int = 0
    hint: str | None = None

    @property
    def draws(self) -> int:
        """Count the completions of a prompt."""
        return self.sampling.n if self.sampling else 0


class Generation:
    """Feed one step to an engine and commit what comes back.

    Only deterministic errors become rows. A shard is committed when its last answer is there, by a thread of the
    pool, while the engine goes on with later requests.
    """

    def __init__(self, context: Context, step: Step, questions: Questions, engine: Engine, *, iteration: int) -> None:
        self.step, self.iteration = step, iteration
        self._context, self._questions, self._engine = context, questions, engine
        self._ids: list[str] = questions.pairs.column("pair_id").to_pylist()
        self._attempt = context.store.attempt(step.key)
        self._plan = self._attempt.plan(self._ids, questions.shard_pairs)
        self._records = dict(self._attempt.shards(self._plan))
        self._reused_shards = len(self._records)
        self._rows: dict[int, list[dict[str, Any]]] = {}
        self._open: dict[int, int] = {}  # shard -> answers still to come
        self._prompts: dict[tuple[str, str], list[int]] = {}
        self._saving: list[Future[None]] = []
        self._letters = engine.template.letters() if questions.forced_choice else None
        self._opening: list[int] = []
        if questions.sampling is None:
            self._letters = engine.template.letters(prompts.OPENING, prompts.CLOSING)
            self._opening = engine.template.encode(prompts.OPENING)
        self._unasked = self._requests()
        self.done_pairs = sum(shard.stop - shard.start for shard in self._plan if shard.index in self._records)
        self.tokens = self.prompt_tokens = 0  # written; read, each prompt once
        self.seconds = 0.0  # of the engine's time, as the session shares it out
        self.in_flight = 0  # sequences
        self._started = time.monotonic()
        self._asked = sum(len(questions.orders[pair_id]) for pair_id in self._ids)
        self._reused = sum(
            len(questions.orders[pair_id])
            for shard in self._plan
            if shard.index in self._records
            for pair_id in self._ids[shard.start : shard.stop]
        )
        self._read = self._reused  # prompts answered, the reused ones included

    def next_request(self) -> Request | None:
        """Give the next request; None when all are asked. Orders of a pair stand side by side."""
        return next(self._unasked, None)

    def _requests(self) -> Iterator[Request]:
        questions = self._questions
        for shard in self._plan:
            if shard.index in self._records:
                continue
            rows = questions.pairs.slice(shard.start, shard.stop - shard.start).to_pylist()
            asked = [(row, order) for row in rows for order in questions.orders[row["pair_id"]]]
            rendered = self._engine.template.prompts([self._messages(row, order) for row, order in asked])
            self._rows[shard.index], self._open[shard.index] = [], len(asked)
            for (row, order), ids in zip(asked, rendered, strict=True):
                self._prompts[row["pair_id"], order] = ids
                tag = (self.step.key, shard.index, row["pair_id"], order, None)
                asked_ids = [*ids, *self._opening]
                yield Request(tag, asked_ids, questions.model, sampling=questions.sampling, letters=self._letters)

    def _messages(self, row: Mapping[str, Any], order: str) -> list[dict[str, str]]:
        shown = (row["response_a"], row["response_b"])
        wording = prompts.worded(self._context.config)
        messages = prompts.judge_messages(wording, row["prompt"], *(shown if order == "ab" else shown[::-1]))
        if self._questions.hint is None:
            return messages
        gold = row["gold"] if order == "ab" else {"A": "B", "B": "A"}[row["gold"]]
        return hints.hinted(messages, self._questions.hint, gold)

    def accept(self, response: Response, pool: ThreadPoolExecutor) -> list[Request]:
        """Take an answer; give the requests that follow from it (the forced choice after each rationale)."""
        for future in self._saving:
            if future.done():
                future.result()  # a failed upload ends the step now, not after its last answer
        _, shard, pair_id, order, row = response.tag
        if row is not None:
            row["prob_a"] = prob_a(response.letter_logprobs) if response.letter_logprobs else None
            self._close_one(shard, pool)
            return []
        self._read += 1
        ids = self._prompts.pop((pair_id, order))
        self.prompt_tokens += len(ids)
        if self._questions.sampling is None:
            self._rows[shard].append(self._choice(pair_id, order, response))
            self._close_one(shard, pool)
            return []
        texts = response.texts or (Text("", "error", 0, None),) * self._questions.draws
        first = self._questions.first_sample
        made = [self._row(pair_id, order, first + draw, text, response.error) for draw, text in enumerate(texts)]
        self._rows[shard].extend(made)
        self.tokens += sum(text.n_tokens for text in texts)
        unread = [row for row, text in zip(made, texts, strict=True) if not self._read_choice(row, text)]
        follow = [] if response.error else self._forced_choice(ids, unread, (shard, pair_id, order))
        self._open[shard] += len(follow)
        self._close_one(shard, pool)
        return follow

    def _read_choice(self, row: dict[str, Any], text: Text) -> bool:
        """Read the forced choice off the completion's own verdict, where it stands right behind `[[`."""
        logprobs = text.letters.get(forced_choice_prefix(text.text))
        row["prob_a"] = prob_a(logprobs) if logprobs else None
        return logprobs is not None

    def _forced_choice(self, ids: list[int], rows: list[dict[str, Any]], tag: tuple[int, str, str]) -> list[Request]:
        if self._letters is None:
            return []
        encode = self._engine.template.encode
        return [
            Request(
                (self.step.key, *tag, row),
                [*ids, *encode(forced_choice_prefix(row["text"]))],
                self._questions.model,
                letters=self._letters,
            )
            for row in rows
        ]

    def _row(self, pair_id: str, order: str, sample: int, text: Text, error: str | None) -> dict[str, Any]:
        return {
            "pair_id": pair_id,
            "checkpoint": self._questions.model,
            "order": order,
            "sample": sample,
            "hinted": self._questions.hint is not None,
            "text": text.text,
            "finish_reason": text.finish_reason,
            "n_tokens": text.n_tokens,
            "logprob": text.logprob,
            "prob_a": None,
            "error": error,
        }

    def _choice(self, pair_id: str, order: str, response: Response) -> dict[str, Any]:
        return {
            "pair_id": pair_id,
            "checkpoint": self._questions.model,
            "order": order,
            "prob_a": prob_a(response.letter_logprobs) if response.letter_logprobs else None,
            "error": response.error,
        }

    def _close_one(self, shard: int, pool: ThreadPoolExecutor) -> None:
        self._open[shard] -= 1
        if self._open[shard] == 0:
            rows = sorted(self._rows.pop(shard), key=lambda row: (row["pair_id"], row["order"], row.get("sample")))
            self._saving.append(pool.submit(self._save, shard, rows))
            bounds = self._plan[shard]
            self.done_pairs += bounds.stop - bounds.start

    def _save(self, shard: int, rows: list[dict[str, Any]]) -> None:
        artifact = "completions" if self._questions.sampling else "choices"
        table = pa.Table.from_pylist(rows, schema=SCHEMAS[artifact])
        errors = sum(row["error"] is not None for row in rows)
        counts = {"in": len(rows), "kept": len(rows) - errors, "dropped": {"error": errors} if errors else {}}
        self._records[shard] = self._attempt.commit_shard(shard, {artifact: table}, counts)

    def weight(self, response: Response) -> int:
        """Count the sequences that a response frees."""
        return 1 if response.tag[-1] is not None else max(self._questions.draws, 1)

    def progress(self) -> Event:
        """Describe how far the step is; `eta` in seconds, None before the first prompt is answered."""
        seconds = time.monotonic() - self._started
        done = self._read - self._reused
        return {
            "event": "progress",
            "step": self.step.name,
            "label": self.step.label,
            "iteration": self.iteration,
            "done": self._read,
            "total": self._asked,
            "unit": "prompts",
            "tokens_per_second": round(self.tokens / seconds, 1) if seconds else 0.0,
            "eta": round(seconds / done * (self._asked - self._read)) if done else None,
        }

    @property
    def answered(self) -> bool:
        """Say whether every answer is there."""
        return self.done_pairs == len(self._ids)

    def commit(self, facts: Mapping[str, Any]) -> Manifest:
        """Wait for the uploads and commit the step; raises what a thread raised."""
        for future in self._saving:
            future.result()
        records = [self._records[shard.index] for shard in self._plan]
        counts: dict[str, Any] = {"in": 0, "kept": 0, "dropped": {}}
        for record in records:
            counts["in"] += record.counts["in"]
            counts["kept"] += record.counts["kept"]
            for reason, number in record.counts["dropped"].items():
                counts["dropped"][reason] = counts["dropped"].get(reason, 0) + number
        manifest = self._attempt.commit(
            step=self.step.name,
            version=self.step.version,
            inputs=dict(self.step.inputs),
            key_parts=self.step.key_parts,
            counts=counts,
            facts={**facts, **self._measured(), "reused_shards": self._reused_shards, **software()},
            shards=records,
        )
        return self._context.done(self.step, manifest, reused=False, iteration=self.iteration)

    def _measured(self) -> dict[str, Any]:
        """Say what was done here: shards that another process had committed are not in it."""
        prompts = self._read - self._reused
        return {
            "tokens": self.tokens,
            "prompts": prompts,
            "prompt_tokens": self.prompt_tokens,
            "completions": prompts * self._questions.draws,
            "seconds": round(self.seconds, 3),
        }


def digests(completions: Sequence[Manifest]) -> dict[str, str | None]:
    """Name an iteration's completions as inputs: the samples, beside them those written with the answer shown."""
    names = ("completions", "hinted")
    return {name: one.artifact("completions").digest for name, one in zip(names, completions, strict=False)}


def read_all(store: Store, completions: Sequence[Manifest]) -> pa.Table:
    """Read an iteration's completions."""
    return pa.concat_tables([store.read(one.artifact("completions")) for one in completions])


def forced_choice_prefix(text: str) -> str:
    """Give the text whose next token is the forced choice: the rationale before its counted verdict, then `[[`."""
    end = rationale_end(text)
    return f"{text.rstrip()} [[" if end is None else f"{text[:end]}[["
