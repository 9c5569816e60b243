"""Serve completions with transformers' own `generate`: any machine that runs torch, no speed to speak of."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from storage.errors import MissingDependencyError, StepFailedError, TransientError
from tasks.engines.base import Request, Response, Sampling, Served, Text, too_long
from tasks.engines.watching import Stopped, Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from configs.run import EngineConfig
    from tasks.engines.template import ChatTemplate

SCORED_POSITIONS = 2048  # rows x positions whose logits are held at once
TAIL = 8  # tokens of the prompt before what is decoded
STOP_SLACK = 4  # tokens more than a stop text has bytes: the first may be the rest of another character


class TransformersEngine:
    """Answer requests of one kind in batches, padded on the left, the oldest kind first; each poll answers a batch."""

    def __init__(
        self, served: Served, config: EngineConfig, template: ChatTemplate, *, max_len: int, seed: int
    ) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM, GenerationConfig, set_seed
        except ImportError as error:
            raise MissingDependencyError(
                f"engine.kind is transformers but it can't be imported ({error}): `pip install starwheel`"
            ) from error
        self.template = template
        self.capacity = config.max_num_seqs
        self.pids: tuple[int, ...] = ()  # it lives in the job's own process
        self._served, self._max_len = served, max_len
        arguments = {"local_files_only": True, "trust_remote_code": False, **config.extra}
        model = AutoModelForCausalLM.from_pretrained(served.base, dtype=getattr(torch, config.dtype), **arguments)
        declared = model.generation_config.eos_token_id
        self._stops = {template.tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])}
        self._stops.discard(None)
        model.generation_config = GenerationConfig()  # the checkpoint's own sampling defaults don't leak in
        self._adapter = None
        if served.adapter is not None:
            from peft import PeftModel

            self._adapter = PeftModel.from_pretrained(model, served.adapter)
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        set_seed(seed)
        self._waiting: deque[Request] = deque()
        self._failed: list[Response] = []

    def add(self, request: Request) -> None:
        """Queue a request; one that can never succeed comes back with its error."""
        if request.model not in (self._served.base_digest, self._served.adapter_digest):
            raise StepFailedError(f"this engine doesn't serve the model {request.model[:12]}")
        if error := too_long(request, self._max_len):
            self._failed.append(Response(request.tag, error=error))
            return
        self._waiting.append(request)

    def poll(self) -> list[Response]:
        """Answer the oldest request and those of its kind that fit beside it; TransientError out of memory."""
        import torch

        failed, self._failed = self._failed, []
        if not self._waiting:
            return failed
        batch = self._next_batch()
        first = batch[0]
        answer = self._write if first.sampling else self._read_letters if first.letters else self._score
        with torch.inference_mode(), self._asked(first.model), _memory_enough(self.capacity):
            return failed + answer(batch)

    def close(self) -> None:
        """Forget what is queued and let the weights go."""
        self._waiting.clear()
        self._model = self._adapter = None

    def _next_batch(self) -> list[Request]:
        """Take requests of the oldest one's kind, in order, up to the capacity in sequences; at least one."""
        kind, room = _kind(self._waiting[0]), self.capacity
        batch: list[Request] = []
        rest = deque[Request]()
        for request in self._waiting:
            rows = request.sampling.n if request.sampling else 1
            if _kind(request) == kind and (rows <= room or not batch):
                batch.append(request)
                room -= rows
            else:
                rest.append(request)
        self._waiting = rest
        return batch

    @contextmanager
    def _asked(self, model: str) -> Iterator[None]:
        """Switch the adapter off where the base model is asked."""
        base = self._adapter is not None and model == self._served.base_digest
        with self._adapter.disable_adapter() if base and self._adapter is not None else nullcontext():
            yield

    def _padded(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Pad token ids on the left: ids, mask and positions, (rows, longest prompt) each."""
        import torch

        longest = max(len(ids) for ids in prompts)
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return {name: tensor.to(self._model.device) for name, tensor in batch.items()}

    def _logprobs(self, prompts: Sequence[Sequence[int]], last: int) -> torch.Tensor:
        """Give the log-probs of all tokens at the last positions: (rows, last, vocabulary), fp32."""
        logits = self._model(**self._padded(prompts), use_cache=False, logits_to_keep=last).logits
        return logits.float().log_softmax(-1)

    def _read_letters(self, batch: list[Request]) -> list[Response]:
        """Read the letters as the next token."""
        after = self._logprobs([request.ids for request in batch], 1)[:, 0]
        return [
            Response(request.tag, letter_logprobs=_letters(row, request))
            for request, row in zip(batch, after, strict=True)
        ]

    def _score(self, batch: list[Request]) -> list[Response]:
        """Give the log-probs of the last prompt tokens."""
        import torch

        last = max(request.scored for request in batch) + 1
        size = max(1, SCORED_POSITIONS // last)
        responses = []
        for part in (batch[first : first + size] for first in range(0, len(batch), size)):
            found = self._logprobs([request.ids for request in part], last)
            for request, row in zip(part, found, strict=True):
                ids = torch.tensor(list(request.ids[-request.scored :]), device=row.device)
                scores = row[-request.scored - 1 : -1].gather(1, ids[:, None])[:, 0]
                responses.append(Response(request.tag, logprobs=tuple(scores.tolist())))
        return responses

    def _write(self, batch: list[Request]) -> list[Response]:
        """Draw the completions of a batch; a request of more than the capacity takes several goes."""
        sampling = batch[0].sampling
        assert sampling is not None, "the kind says so"
        rows = [request for request in batch for _ in range(sampling.n)]
        texts: list[Text] = []
        for first in range(0, len(rows), self.capacity):
            texts += self._generate(rows[first : first + self.capacity], sampling)
        return [
            Response(request.tag, tuple(texts[at * sampling.n : (at + 1) * sampling.n]))
            for at, request in enumerate(batch)
        ]

    def _generate(self, rows: list[Request], sampling: Sampling) -> list[Text]:
        from transformers import GenerationConfig

        padded = self._padded([request.ids for request in rows])
        del padded["position_ids"]  # generate counts them on from the mask
        start = padded["input_ids"].shape[1]
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        settings = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            eos_token_id=sorted(self._stops),
            pad_token_id=min(self._stops),
            **(drawn if sampling.temperature > 0 else {"do_sample": False}),
        )
        watched = Watched(start, rows[0].letters)
        stopped = Stopped(start, sampling.stop, self._decode, slack=STOP_SLACK)
        ids = self._model.generate(
            **padded, generation_config=settings, logits_processor=[watched], stopping_criteria=[stopped]
        )
        watched.finish(ids)
        written = ids[:, start:].tolist()
        tails = [list(request.ids[-TAIL:]) for request in rows]
        return [self._text(one, tails[row], row, watched, stopped) for row, one in enumerate(written)]

    def _text(self, ids: list[int], tail: list[int], row: int, watched: Watched, stopped: Stopped) -> Text:
        """Cut what was written at its first end: a token that ends a turn, a stop text, or the limit."""
        ended = next((at + 1 for at, token in enumerate(ids) if token in self._stops), None)
        ends = [end for end in (ended, stopped.ends.get(row)) if end is not None]
        ids = ids[: min(ends, default=len(ids))]
        text = stopped.cut(behind(self._decode, tail, ids))
        letters = {
            behind(self._decode, tail, ids[:at]): pair for at, pair in watched.letters[row].items() if at < len(ids)
        }
        return Text(text, "stop" if ends else "length", len(ids), sum(watched.logprobs[row][: len(ids)]), letters)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.template.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def behind(decode: Callable[[list[int]], str], tail: list[int], ids: list[int]) -> str:
    """Decode what stands behind the end of a prompt: by itself its first blank is lost to some tokenizers."""
    before, whole = decode(tail), decode([*tail, *ids])
    return whole[len(before) :] if whole.startswith(before) else decode(ids)


class Kind(NamedTuple):
    """Name what requests of one batch share."""

    model: str
    sampling: Sampling | None
    letters: tuple[int, int] | None
    scored: bool


def _kind(request: Request) -> Kind:
    return Kind(request.model, request.sampling, request.letters, request.scored > 0)


def _letters(logprobs: torch.Tensor, request: Request) -> tuple[float, float]:
    assert request.letters is not None, "the kind says so"
    a, b = logprobs[list(request.letters)].tolist()
    return a, b


@contextmanager
def _memory_enough(capacity: int) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TransientError(
            f"engine: the GPU's memory is too small for {capacity} sequences at once; lower engine.max_num_seqs"
        ) from error
