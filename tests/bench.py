"""Measure what docs/benchmarks.md quotes: `make bench`, or `python -m tests.bench sampling` for one part.

Sampling with commits and a bare `vllm.LLM.chat` take turns over the same prompts, so that a noisy machine hits both.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.load import load_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from configs.run import RunConfig

PLACES = ("in process", "own process")
TURNS = ("bare", "ours", "ours", "bare")  # a machine that grows slower or faster hits both alike
ROOT = Path(__file__).parents[1]


def sampling(pairs: int = 128) -> dict[str, Any]:
    """Compare tokens a second: our session's sampling, commits included, against one bare `LLM.chat`.

    Both run with the engine's core in a process of its own (vLLM's default) and in the job's (`engine.in_process`).
    """
    with tempfile.TemporaryDirectory() as folder:
        described = _prepare(Path(folder), pairs)
        rates: dict[str, list[float]] = {f"{who}, {where}": [] for where in PLACES for who in ("bare", "ours")}
        for where in PLACES:
            for number, who in enumerate(TURNS):
                engine = described.engine.model_copy(update={"in_process": where == "in process"})
                config = described.model_copy(update={"engine": engine}).model_dump(mode="json")
                spec = json.dumps({"config": config, "folder": folder, "round": f"{number}, {where}"})
                done = subprocess.run(
                    [sys.executable, "-m", "tests.bench", f"_{who}", spec],
                    capture_output=True,
                    text=True,
                    check=True,
                    cwd=ROOT,
                    env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
                )
                line = next(line for line in done.stdout.splitlines() if line.startswith("RATE "))
                rates[f"{who}, {where}"].append(float(line.split()[1]))
                print(f"{who}, {where}: {rates[f'{who}, {where}'][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
    mean = {name: sum(found) / len(found) for name, found in rates.items()}
    return {
        "tokens_per_second": rates,
        "ours to bare": {where: mean[f"ours, {where}"] / mean[f"bare, {where}"] for where in PLACES},
        "in process to own process": mean["ours, in process"] / mean["ours, own process"],
    }


def _prepare(folder: Path, pairs: int) -> RunConfig:
    """Commit base model and split of a demo-like run whose one part holds `pairs` pairs."""
    from storage.store import open_store
    from tasks.jobs.launch import ProcessLauncher
    from tasks.run import Run, create_run, open_run

    described = load_config(
        "demo",
        [
            f"store={folder}/store",
            f"work={folder}/work",
            "iterations=1",
            "bootstrap=null",
            "prompt.system=Judge. End with [[A]] or [[B]].",
            "model.max_len=160",
            "split.bootstrap=0",
            "split.dev=0.01",
            "split.test=0",
            f"data.sources=[{{name: made, generator: {{categories: [contains, question, starts], count: {pairs}}}}}]",
            "data.suites=[]",
            "gate.on_worse=continue",
        ],
    )
    store = open_store(described.store)
    run = open_run(store, create_run(store, described), ProcessLauncher, kind=Run, listen=lambda event: None)
    run.split(run.base())
    return described


def _open(spec: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Find model, part and context that `_prepare` committed."""
    from configs.run import RunConfig
    from storage.store import open_store
    from tasks import models, split
    from tasks.models import Model
    from tasks.step import Context

    config = RunConfig.model_validate(spec["config"])
    store = open_store(config.store)
    context = Context(store, config, Path(spec["folder"]) / "work")
    base = store.manifest(models.base_step(config, store.cache.root).key)
    assert base is not None
    model = Model(**base.facts["model"])
    step = split.split_step(config, model, split.fetch_sources(config, store.cache.root))
    return context, model, split.committed_split(context, step.key).pairs("part-1")


def _bare(spec: dict[str, Any]) -> float:
    from vllm import LLM, SamplingParams

    from tasks.judge.prompts import render, shown_order

    context, model, pairs = _open(spec)
    config = context.config
    orders = shown_order(config.seed, pairs.column("pair_id").to_pylist())
    chats = [list(one) for one in render(pairs, orders, config.prompt).column("prompt").to_pylist()]
    os.environ.update(VLLM_CPU_KVCACHE_SPACE=str(config.engine.cpu_kv_cache_gib), VLLM_CPU_NUM_OF_RESERVED_CPU="0")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if config.engine.in_process else "1"
    llm = LLM(
        model=str(context.store.fetch_checkpoint(model.base)),
        dtype=config.engine.dtype,
        enforce_eager=config.engine.enforce_eager,
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=config.model.max_len,
        generation_config="vllm",
        **({"distributed_executor_backend": "uni"} if config.engine.in_process else {}),
        **config.engine.extra,
    )
    params = SamplingParams(
        n=config.sample.n, temperature=1.0, top_p=config.sample.top_p, max_tokens=config.sample.max_tokens
    )
    llm.chat(chats[:4], params, use_tqdm=False, add_generation_prompt=True)
    started = time.monotonic()
    outputs = llm.chat(chats, params, use_tqdm=False, add_generation_prompt=True)
    seconds = time.monotonic() - started
    llm.llm_engine.engine_core.shutdown()  # its processes would hold this one's output open
    return sum(len(one.token_ids) for output in outputs for one in output.outputs) / seconds


def _ours(spec: dict[str, Any]) -> float:
    from concurrent.futures import ThreadPoolExecutor

    from tasks.engines.base import Request, Sampling
    from tasks.generation import Generation
    from tasks.jobs.entry import start_engine
    from tasks.jobs.session import SessionPlan
    from tasks.sample import sample_questions
    from tasks.step import Step

    context, model, pairs = _open(spec)
    engine = start_engine(context, SessionPlan(0, model, None, "", None, None, sample=True), "0" * 64)
    for row in range(4):
        ids = engine.template.prompts([[{"role": "user", "content": f"warm up {row}"}]])[0]
        engine.add(Request(row, ids, model.digest, sampling=Sampling(4, 1.0, 0.95, 24)))
    warm = 0
    while warm < 4:
        warm += len(engine.poll())
    questions = sample_questions(context.config, pairs, model)
    step = Step("sample", 1, {}, {"bench": spec["round"]})
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        generation = Generation(context, step, questions, engine, iteration=1)
        while request := generation.next_request():
            engine.add(request)
        while not generation.answered:
            for response in engine.poll():
                generation.accept(response, pool)
        generation.commit({})
    seconds = time.monotonic() - started
    engine.close()
    return generation.tokens / seconds


def judgments(number: int = 1_000_000) -> dict[str, Any]:
    """Time a million completions through judge, select and pairs (SFT and DPO)."""
    from configs.run import PairsConfig, SelectConfig
    from tasks import pairs, select
    from tasks.judge import verdict

    sys.path.insert(0, str(ROOT / "tests"))  # where pytest puts it: tests import each other by their bare names
    from judge_cases import PROMPT
    from test_pairs import many

    completions, stored = many(number)
    made: dict[str, Any] = {"judgments": number}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = call()
        made[name] = round(time.monotonic() - started, 2)
        return result

    judged = timed("judge", lambda: verdict.judge(completions, stored))
    kept, _ = timed("select", lambda: select.select(judged, SelectConfig(), seed=1))
    timed("sft_rows", lambda: pairs.sft_rows(kept, completions, stored, PROMPT))
    sides, _ = timed(
        "select_sides", lambda: select.select_sides(judged, SelectConfig(), seed=1, unparsed_rejected=False)
    )
    timed("dpo_rows", lambda: pairs.dpo_rows(sides, completions, stored, PROMPT, PairsConfig(), seed=1))
    made["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    return made


def main() -> None:
    """Run the parts named, or all."""
    if len(sys.argv) == 3 and sys.argv[1] in {"_bare", "_ours"}:
        part = {"_bare": _bare, "_ours": _ours}[sys.argv[1]]
        print(f"RATE {part(json.loads(sys.argv[2]))}", flush=True)
        os._exit(0)
    parts: dict[str, Callable[[], dict[str, Any]]] = {"judgments": judgments, "sampling": sampling}
    for name in sys.argv[1:] or list(parts):
        print(name, json.dumps(parts[name](), indent=2))


if __name__ == "__main__":
    main()
