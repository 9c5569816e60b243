"""Write the completions of one step: requests stream in, shards are committed as they finish."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage.schema import JUDGMENT_ID, SCHEMAS, Status
from tasks.engines.base import Engine, Request, Response, Sampling, Text, prob_a
from tasks.judge import frames, hints, prompts
from tasks.judge.verdict import rationale_end
from tasks.step import Context, Event, Step, software

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from storage.manifest import Manifest
    from storage.store import Store


@dataclass(frozen=True)
class Begun:
    """Name a stored completion that is mended: `text` is gone on from, `draws` times, for at most `more` tokens."""

    row: Mapping[str, Any]
    text: str
    draws: int
    more: int


@dataclass(frozen=True)
class Questions:
    """Hold what is asked: rows of `pairs` sorted by id, the orders each is shown in, how completions are drawn.

    `forced_choice` reads P(A) against P(B) after `[[`, following each completion's own rationale. Without `sampling`
    nothing is written: P(A) against P(B) is read right behind the prompt and `[[`. A `hint` shows the answer. With
    `begun`, pair id and order -> stored completions, these are mended and nothing else is asked.
    """

    pairs: pa.Table
    orders: Mapping[str, Sequence[str]]  # pair id -> orders shown
    sampling: Sampling | None
    model: str
    forced_choice: bool
    shard_pairs: int
    first_sample: int = 0
    hint: str | None = None
    begun: Mapping[tuple[str, str], Sequence[Begun]] | None = None

    def asks(self, pair_id: str) -> list[tuple[str, Begun | None]]:
        """List the requests for a pair: its order, and the completion that is mended."""
        orders = self.orders[pair_id]
        if self.begun is None:
            return [(order, None) for order in orders]
        return [(order, begun) for order in orders for begun in self.begun.get((pair_id, order), ())]

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
        self._prompts: dict[tuple[str, str, int | None], list[int]] = {}
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
        self._asked = sum(len(questions.asks(pair_id)) for pair_id in self._ids)
        self._reused = sum(
            len(questions.asks(pair_id))
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
            asked = [(row, order, begun) for row in rows for order, begun in questions.asks(row["pair_id"])]
            rendered = self._engine.template.prompts([self._messages(row, order) for row, order, _ in asked])
            self._rows[shard.index], self._open[shard.index] = [], len(asked)
            for (row, order, begun), ids in zip(asked, rendered, strict=True):
                self._prompts[row["pair_id"], order, _sample(begun)] = ids
                tag = (self.step.key, shard.index, row["pair_id"], order, begun)
                asked_ids, sampling = [*ids, *self._opening], questions.sampling
                if begun is not None:
                    asked_ids, sampling = self._going_on(ids, begun)
                yield Request(tag, asked_ids, questions.model, sampling=sampling, letters=self._letters)

    def _going_on(self, ids: list[int], begun: Begun) -> tuple[list[int], Sampling]:
        """Go on behind the text for as long as the token budget allows; the engine refuses what has no room left."""
        assert self._questions.sampling is not None, "what was drawn is mended by drawing"
        asked = [*ids, *self._engine.template.encode(begun.text)]
        room = max(self._context.config.model.max_len - len(asked), 1)
        return asked, replace(self._questions.sampling, n=begun.draws, max_tokens=min(begun.more, room))

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
        _, shard, pair_id, order, what = response.tag
        if isinstance(what, dict):
            what["prob_a"] = prob_a(response.letter_logprobs) if response.letter_logprobs else None
            self._close_one(shard, pool)
            return []
        self._read += 1
        ids = self._prompts.pop((pair_id, order, _sample(what)))
        self.prompt_tokens += len(ids)
        if what is not None:
            self._rows[shard].append(mended(what, response.texts))
            self.tokens += sum(text.n_tokens for text in response.texts)
            self._close_one(shard, pool)
            return []
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
        still = still_broken if self._questions.begun is not None else _error
        dropped = Counter(reason for row in rows if (reason := still(row)))
        counts = {"in": len(rows), "kept": len(rows) - dropped.total(), "dropped": dict(sorted(dropped.items()))}
        self._records[shard] = self._attempt.commit_shard(shard, {artifact: table}, counts)

    def weight(self, response: Response) -> int:
        """Count the sequences that a response frees."""
        what = response.tag[-1]
        if isinstance(what, Begun):
            return what.draws
        return 1 if what is not None else max(self._questions.draws, 1)

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
            "completions": prompts if self._questions.begun is not None else prompts * self._questions.draws,
            "seconds": round(self.seconds, 3),
        }


def mended(begun: Begun, texts: Sequence[Text]) -> dict[str, Any]:
    """Give the row of a mended completion: the first draw with a verdict, else the first where a text was gone on from.

    The stored row stays where nothing was drawn and where no draw from the start has a verdict.
    """
    text = next((one for one in texts if one.finish_reason == "stop" and rationale_end(begun.text + one.text)), None)
    if text is None and begun.text:
        text = next(iter(texts), None)
    if text is None:
        return dict(begun.row)
    before = (begun.row["n_tokens"], begun.row["logprob"]) if begun.text else (0, 0.0)
    logprob = None if before[1] is None or text.logprob is None else before[1] + text.logprob
    return {
        **begun.row,
        "text": begun.text + text.text,
        "finish_reason": text.finish_reason,
        "n_tokens": before[0] + text.n_tokens,
        "logprob": logprob,
    }


def still_broken(row: Mapping[str, Any]) -> str | None:
    """Say what a mended row still is: truncated or unparsed."""
    if row["finish_reason"] == "length":
        return str(Status.TRUNCATED)
    return str(Status.UNPARSED) if rationale_end(row["text"]) is None else None


def _error(row: Mapping[str, Any]) -> str | None:
    return "error" if row["error"] is not None else None


def _sample(begun: Begun | None) -> int | None:
    return None if begun is None else begun.row["sample"]


def digests(completions: Mapping[str, Manifest]) -> dict[str, str | None]:
    """Name an iteration's completions as inputs.

    They are named by what they are: `completions` (asked of every pair), and what follows from them, `repaired` and
    `hinted`.
    """
    return {name: one.artifact("completions").digest for name, one in completions.items()}


def read_all(store: Store, completions: Mapping[str, Manifest]) -> pa.Table:
    """Read an iteration's completions; a repaired one stands in for what it was."""
    tables = {name: store.read(one.artifact("completions")) for name, one in completions.items()}
    if "repaired" in tables:
        sampled, repaired = (frames.frame(tables[one].select(JUDGMENT_ID)) for one in ("completions", "repaired"))
        left = sampled.with_row_index("row").join(repaired, on=JUDGMENT_ID, how="anti")["row"].sort()
        tables["completions"] = tables["completions"].take(left.to_arrow())
    return pa.concat_tables(tables.values())


def forced_choice_prefix(text: str) -> str:
    """Give the text whose next token is the forced choice: the rationale before its counted verdict, then `[[`."""
    end = rationale_end(text)
    return f"{text.rstrip()} [[" if end is None else f"{text[:end]}[["
