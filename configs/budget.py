"""Compute what a run needs of memory from the model's own files, before torch or vLLM is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from configs.facts import ModelFacts, find_facts, model_facts
from configs.load import ConfigError
from configs.machine import GIB, Machine, find_machine
from configs.run import FORCED_CHOICE_TOKENS, EngineKind, Method, RunConfig

__all__ = ["Machine", "Memory", "ModelFacts", "Part", "find_machine", "fit", "memory", "model_facts"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
LOGIT_BYTES = 12
MASTER_BYTES = 16  # fp32: weight 4, gradient 4, two moments of Adam 8
WEIGHT_BYTES = 4
LAYER_BYTES = 34  # activations of one layer a token, in units of its width, 16 bit (Korthikanti et al. 2022, eq. 2)
ENGINE_BYTES = 3 * GIB  # its processes and work buffers: measured 2.9 beside weights and cache, vLLM 0.32 on CPU
TRAINER_BYTES = 1.5 * GIB  # interpreter, libraries, work buffers


@dataclass(frozen=True)
class Part:
    """Hold one row of the memory table."""

    job: str  # engine | trainer
    name: str
    gib: float
    formula: str


@dataclass(frozen=True)
class Memory:
    """Hold what each job needs on one device; engine and trainer never run at the same time."""

    parts: tuple[Part, ...]
    problems: tuple[str, ...]

    @cached_property
    def engine(self) -> float:
        """Give the GiB of the engine."""
        return sum(part.gib for part in self.parts if part.job == "engine")

    @cached_property
    def trainer(self) -> float:
        """Give the GiB of the trainer."""
        return sum(part.gib for part in self.parts if part.job == "trainer")


def fit(config: RunConfig, machine: Machine | None = None) -> list[tuple[str, float | None]]:
    """Give the memory table (what, GiB), of one row where nothing is known of the model yet.

    The last row is what there is of it. Raises ConfigError with all that doesn't fit the model or the machine: the one
    given, else the GPUs that `hardware` names, else this one.
    """
    facts = find_facts(config.model)
    if facts is None:
        return [(f"known once {config.model.base} is fetched", None)]
    needed = memory(config, facts, machine)
    if needed.problems:
        raise ConfigError(needed.problems)
    rows: list[tuple[str, float | None]] = []
    for job, total in (("engine", needed.engine), ("trainer", needed.trainer)):
        parts = [part for part in needed.parts if part.job == job]
        rows += [(f"{job}: {part.name} = {part.formula}", part.gib) for part in parts]
        rows += [(f"{job} in all", total)] if parts else []
    there = machine or _named(config) or find_machine()
    if there.gpus:
        return [*rows, (f"there is on each of {len(there.gpus)} GPUs", min(there.gpus))]
    return [*rows, ("there is of free RAM", there.ram)]


def memory(config: RunConfig, facts: ModelFacts, machine: Machine | None = None) -> Memory:
    """Estimate what the engine and the trainer need on one device, for rows as long as model.max_len allows."""
    named = None if machine else _named(config)
    machine = machine or named or find_machine()
    parts: list[Part] = []
    if config.engine.kind is EngineKind.VLLM:
        parts += _engine(config, facts, machine)
    if config.engine.kind is EngineKind.TRANSFORMERS:
        parts += _plain_engine(config, facts)
    if config.train.kind == "trl":
        parts += _trainer(config, facts, gpu=bool(machine.gpus))
    needed = Memory(tuple(parts), ())
    return Memory(
        needed.parts, tuple(_problems(config, facts, machine, needed, lever="hardware.gpus" if named else ""))
    )


def _named(config: RunConfig) -> Machine | None:
    """Give the machine that a config names; its RAM isn't asked for where there are GPUs."""
    named = config.hardware
    return Machine(math.inf, (named.gpu_memory_gib,) * named.gpus) if named else None


def _sequence_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Give the KV cache of one sequence of full length, on one device."""
    engine = config.engine
    width = 1 if engine.kv_cache_dtype.startswith("fp8") else DTYPE_BYTES[engine.dtype]
    return (config.model.max_len + FORCED_CHOICE_TOKENS) * facts.kv_bytes_per_token * width / 2 / engine.tensor_parallel


def _engine(config: RunConfig, facts: ModelFacts, machine: Machine) -> list[Part]:
    engine, lora = config.engine, config.train.lora
    width = DTYPE_BYTES[engine.dtype]
    weights = facts.parameters * width / engine.tensor_parallel
    parts = [
        _part("engine", "weights", weights, f"parameters × {width} B / tensor_parallel"),
        _part("engine", "processes and buffers", ENGINE_BYTES, "constant"),
    ]
    if lora and engine.adapter == "serve":
        adapter = lora.r * facts.linear_width * width
        parts.append(_part("engine", "adapter", adapter, f"r × (inputs + outputs of all linear layers) × {width} B"))
    if not machine.gpus:
        return [*parts, _part("engine", "KV cache", engine.cpu_kv_cache_gib * GIB, "engine.cpu_kv_cache_gib")]
    one = _sequence_bytes(config, facts)
    room = (min(machine.gpus) * engine.gpu_memory - sum(part.gib for part in parts)) * GIB
    cache = max(min(engine.max_num_seqs * one, room), one)
    return [*parts, _part("engine", "KV cache", cache, "max_num_seqs × max_len × bytes a token, at most what is left")]


def _plain_engine(config: RunConfig, facts: ModelFacts) -> list[Part]:
    """Give what transformers takes: a cache of its own for each sequence, and the next token's logits of all."""
    engine = config.engine
    width = DTYPE_BYTES[engine.dtype]
    logits = engine.max_num_seqs * facts.vocab * LOGIT_BYTES
    return [
        _part("engine", "weights", facts.parameters * width, f"parameters × {width} B"),
        _part("engine", "process and buffers", TRAINER_BYTES, "constant"),
        _part(
            "engine",
            "KV cache",
            engine.max_num_seqs * _sequence_bytes(config, facts),
            "max_num_seqs × max_len × bytes a token",
        ),
        _part("engine", "logits", logits, f"max_num_seqs × vocabulary × {LOGIT_BYTES} B (fp32, their softmax)"),
    ]


def _trainer(config: RunConfig, facts: ModelFacts, *, gpu: bool) -> list[Part]:
    train, dpo = config.train, config.method is Method.STAR_DPO
    width = 2 if gpu else 4  # frozen weights
    parts = [_part("trainer", "process and buffers", TRAINER_BYTES, "constant")]
    if train.lora:
        adapter = train.lora.r * facts.linear_width * MASTER_BYTES
        formula = f"r × (inputs + outputs of all linear layers) × {MASTER_BYTES} B (weight, gradient, Adam; fp32)"
        parts.append(_part("trainer", "frozen weights", facts.parameters * width, f"parameters × {width} B"))
        parts.append(_part("trainer", "adapter", adapter, formula))
        if dpo:  # in full tuning it is gone before the gradients come, and smaller than they are
            parts.append(_part("trainer", "reference model", facts.parameters * width, f"parameters × {width} B"))
    else:
        shards = train.processes if gpu else 1
        formula = f"parameters × {MASTER_BYTES} B (fp32)" + (" / processes" if shards > 1 else "")
        parts.append(_part("trainer", "weights, gradients, Adam", facts.parameters * MASTER_BYTES / shards, formula))
        if shards > 1:
            whole = facts.parameters * WEIGHT_BYTES
            parts.append(_part("trainer", "whole weights to save", whole, f"parameters × {WEIGHT_BYTES} B (fp32)"))
    parts += _batch(config, facts, rows=2 if dpo else 1, gpu=gpu)
    if gpu or train.processes == 1:
        return parts
    return [Part(one.job, one.name, one.gib * train.processes, f"{one.formula} × processes") for one in parts]


def _batch(config: RunConfig, facts: ModelFacts, *, rows: int, gpu: bool) -> list[Part]:
    """Give what a batch of full-length rows takes; a DPO row is two (chosen, rejected).

    On a GPU each layer keeps its input and is computed again on the way back; on a CPU all layers keep everything.
    """
    tokens = config.train.per_device_batch * config.model.max_len * rows
    how = "per_device_batch × max_len" + (" × 2" if rows == 2 else "")
    width, inside = (4 * facts.layers + LAYER_BYTES, f"4 B × layers + {LAYER_BYTES} B")
    if not gpu:
        width, inside = (2 * LAYER_BYTES * facts.layers, f"{2 * LAYER_BYTES} B × layers")
    logits = tokens * facts.vocab * LOGIT_BYTES
    return [
        _part("trainer", "activations", tokens * facts.hidden * width, f"{how} × hidden × ({inside})"),
        _part("trainer", "logits", logits, f"{how} × vocabulary × {LOGIT_BYTES} B (fp32, their softmax and gradient)"),
    ]


def _part(job: str, name: str, size: float, formula: str) -> Part:
    return Part(job, name, size / GIB, formula)


def _problems(config: RunConfig, facts: ModelFacts, machine: Machine, needed: Memory, *, lever: str) -> list[str]:
    """Say what doesn't fit; `lever` is the key that names more GPUs, where one does."""
    engine, most = config.engine, facts.max_positions
    problems = []
    length = config.model.max_len + (0 if engine.kind is EngineKind.SCRIPTED else FORCED_CHOICE_TOKENS)
    if most is not None and length > most:
        problems.append(
            f"model.max_len: {config.model.max_len} is too long for the model, which knows {most} positions; "
            f"set {most - length + config.model.max_len} or less."
        )
    also = f", or raise {lever}" if lever else ""
    if machine.gpus and engine.tensor_parallel > len(machine.gpus):
        problems.append(
            f"engine.tensor_parallel: {engine.tensor_parallel} GPUs are asked for "
            f"and there are {len(machine.gpus)}; lower it{also}."
        )
    if machine.gpus and config.train.processes > len(machine.gpus):
        problems.append(
            f"train.processes: {config.train.processes} GPUs are asked for "
            f"and there are {len(machine.gpus)}; lower it{also}."
        )
    one = _sequence_bytes(config, facts) / GIB
    if engine.kind is EngineKind.VLLM and not machine.gpus and one > engine.cpu_kv_cache_gib:
        problems.append(
            f"engine.cpu_kv_cache_gib: {engine.cpu_kv_cache_gib} GiB hold no sequence of model.max_len, "
            f"which takes {one:.1f}; set {math.ceil(one)} or more."
        )
    return problems + _too_large(config, machine, needed)


def _too_large(config: RunConfig, machine: Machine, needed: Memory) -> list[str]:
    """Say which job doesn't fit where it would run."""
    whole = usable = min(machine.gpus) if machine.gpus else machine.ram
    there, lever = f"there is free RAM of {whole:.1f} GiB", "lower engine.cpu_kv_cache_gib"
    if machine.gpus:
        usable = whole * config.engine.gpu_memory
        there, lever = f"there is a GPU of {whole:.1f} GiB", "raise engine.tensor_parallel or engine.gpu_memory"
    if config.engine.kind is EngineKind.TRANSFORMERS:
        usable, lever = whole, "lower engine.max_num_seqs"
    problems = []
    if needed.engine > usable:
        share = f", {usable:.1f} of it by engine.gpu_memory" if usable < whole else ""
        problems.append(
            f"engine: it needs about {needed.engine:.1f} GiB and {there}{share}; "
            f"choose a smaller model, lower model.max_len or {lever}."
        )
    if needed.trainer > whole:
        adapter = "" if config.train.lora else ", or train an adapter (`train.lora`)"
        problems.append(
            f"train: it needs about {needed.trainer:.1f} GiB and {there}; "
            f"lower train.per_device_batch or model.max_len{adapter}."
        )
    return problems
