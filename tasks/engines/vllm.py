"""Serve completions with vLLM, on CUDA and on CPU, base weights and LoRA adapters."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from configs.run import FORCED_CHOICE_TOKENS
from storage.errors import MissingDependencyError, StepFailedError, TransientError
from tasks.engines.base import Request, Response, Served, Text, too_long

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from configs.run import EngineConfig
    from tasks.engines.template import ChatTemplate


class VllmEngine:
    """Drive one `LLMEngine` request by request, so that shards commit while later requests run."""

    def __init__(
        self, served: Served, config: EngineConfig, template: ChatTemplate, *, max_len: int, seed: int
    ) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(config.cpu_kv_cache_gib))
        if config.in_process:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            from vllm import EngineArgs, LLMEngine
            from vllm.lora.request import LoRARequest
        except ImportError as error:
            raise MissingDependencyError(
                f"engine.kind is vllm but vLLM can't be imported ({error}): "
                "`pip install 'starwheel[gpu]'`, or `pip install 'starwheel[cpu]'` without a GPU"
            ) from error
        self.template = template
        self.capacity = config.max_num_seqs
        self._max_len = max_len
        self._served = served
        self._adapter = (
            LoRARequest("judge", 1, str(served.adapter), base_model_name=str(served.base)) if served.adapter else None
        )
        arguments: dict[str, Any] = {
            "model": str(served.base),
            "dtype": config.dtype,
            "quantization": config.quantization,
            "kv_cache_dtype": config.kv_cache_dtype,
            "tensor_parallel_size": config.tensor_parallel,
            "gpu_memory_utilization": config.gpu_memory,
            "enforce_eager": config.enforce_eager,
            "max_num_seqs": config.max_num_seqs,
            "max_model_len": max_len + FORCED_CHOICE_TOKENS,
            "enable_prefix_caching": True,
            "generation_config": "vllm",  # the checkpoint's own sampling defaults don't leak in
            "trust_remote_code": False,
            "disable_log_stats": True,
            "seed": seed,
            **({"distributed_executor_backend": "uni"} if config.in_process else {}),
            **({"enable_lora": True, "max_lora_rank": _rank(served)} if served.adapter else {}),
            **config.extra,
        }
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._running: dict[str, Request] = {}
        self._failed: list[Response] = []
        self._count = 0
        self.pids = _children()

    def add(self, request: Request) -> None:
        """Queue a request; one that can never succeed comes back with its error."""
        from vllm.inputs import TokensPrompt

        if error := too_long(request, self._max_len):
            self._failed.append(Response(request.tag, error=error))
            return
        self._count += 1
        name = str(self._count)
        prompt = TokensPrompt(prompt_token_ids=list(request.ids))
        params, adapter = _params(request), self._lora(request.model)
        with _engine_alive():
            self._engine.add_request(name, prompt, params, lora_request=adapter)
        self._running[name] = request

    def _lora(self, model: str) -> Any:
        if model == self._served.adapter_digest:
            return self._adapter
        if model == self._served.base_digest:
            return None
        raise StepFailedError(f"this engine doesn't serve the model {model[:12]}")

    def poll(self) -> list[Response]:
        """Advance one engine step."""
        failed, self._failed = self._failed, []
        if not self._running:
            return failed
        with _engine_alive():
            outputs = self._engine.step()
        return failed + [self._response(output) for output in outputs if output.finished]

    def _response(self, output: Any) -> Response:
        request = self._running.pop(output.request_id)
        if request.letters and not request.sampling:
            return Response(request.tag, letter_logprobs=_letter_logprobs(output.outputs[0].logprobs[0], request))
        if request.scored:
            rows = output.prompt_logprobs[-request.scored :]
            ids = request.ids[-request.scored :]
            return Response(
                request.tag, logprobs=tuple(row[token].logprob for row, token in zip(rows, ids, strict=True))
            )
        return Response(request.tag, tuple(self._text(one, request) for one in output.outputs))

    def _text(self, one: Any, request: Request) -> Text:
        ids, decode = list(one.token_ids), self.template.tokenizer.decode
        letters = {
            decode(ids[:place], skip_special_tokens=True): _letter_logprobs(one.logprobs[place], request)
            for place, token in enumerate(ids)
            if token in (request.letters or ())
        }
        return Text(one.text, one.finish_reason, len(ids), one.cumulative_logprob, letters)

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._engine.engine_core.shutdown()


@contextmanager
def _engine_alive() -> Iterator[None]:
    """Call an engine that has died transient: a new start may mend it. vLLM raises many kinds."""
    try:
        yield
    except Exception as error:
        raise TransientError(f"the vLLM engine stopped: {type(error).__name__}: {error}") from error


def _letter_logprobs(logprobs: Mapping[int, Any], request: Request) -> tuple[float, float]:
    assert request.letters is not None
    a, b = (logprobs[token].logprob for token in request.letters)
    return a, b


def _params(request: Request) -> Any:
    """Translate a request; no per-request seed, which the CPU generator refuses."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    final = {"output_kind": RequestOutputKind.FINAL_ONLY}
    letters: dict[str, Any] = {"logprob_token_ids": list(request.letters)} if request.letters else {}
    if request.sampling is None:
        asked = letters or {"prompt_logprobs": 0}
        return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **asked, **final)
    return SamplingParams(
        n=request.sampling.n,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        max_tokens=request.sampling.max_tokens,
        stop=list(request.sampling.stop),
        include_stop_str_in_output=True,
        **(letters or {"logprobs": 0}),
        **final,
    )


def _rank(served: Served) -> int:
    """Read the adapter's rank, rounded up to one that vLLM knows."""
    assert served.adapter is not None
    rank = json.loads((served.adapter / "adapter_config.json").read_text())["r"]
    return next(known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank)


def _children() -> tuple[int, ...]:
    import psutil

    return tuple(child.pid for child in psutil.Process().children(recursive=True))
