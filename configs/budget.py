"""Compute what a run needs of memory from the model's own files, before torch or vLLM is imported."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.load import ConfigError
from configs.machine import GIB, Machine, find_machine
from configs.run import EngineKind, Method, RunConfig

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FORCED_CHOICE = 2  # tokens that the engine adds to model.max_len to read a verdict's letter
MASTER_BYTES = 16  # fp32: weight 4, gradient 4, two moments of Adam 8
FROZEN_BYTES = 4  # the base model under an adapter, and the reference model of full tuning
LAYER_BYTES = 34  # activations of one layer a token, in units of its width, 16 bit (Korthikanti et al. 2022, eq. 2)
ENGINE_BYTES = 3 * GIB  # its processes and work buffers: measured 2.9 beside weights and cache, vLLM 0.32 on CPU
TRAINER_BYTES = 1.5 * GIB  # interpreter, libraries, work buffers


@dataclass(frozen=True)
class ModelFacts:
    """Hold what a model's files say of its size; `max_positions` is None where they don't say it."""

    parameters: int
    layers: int
    hidden: int
    vocab: int
    kv_bytes_per_token: int  # keys and values of all layers, at 2 bytes a number
    linear_width: int  # inputs + outputs of all linear layers: a LoRA adapter has r times as many parameters
    max_positions: int | None


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


# ---- the model's files -----------------------------------------------------------------------------------------------


def model_facts(folder: str | Path) -> ModelFacts:
    """Read `config.json`, and the headers of the safetensors where there are any. Raises ConfigError."""
    file = Path(folder) / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        shape = raw.get("text_config", raw)
        return _facts(shape, _stored_parameters(Path(folder)))
    except FileNotFoundError:
        raise ConfigError(
            [f"model.base: there is no model at {file.absolute().parent}, no config.json; correct the path."]
        ) from None
    except (OSError, ValueError, AttributeError, TypeError, struct.error) as error:
        raise ConfigError(
            [f"model.base: {file.absolute().parent} can't be read as a model ({error}); fetch it again."]
        ) from error


def _facts(shape: dict[str, Any], stored: int | None) -> ModelFacts:
    layers, hidden = _number(shape, "num_hidden_layers", "n_layer"), _number(shape, "hidden_size", "n_embd")
    heads, vocab = _number(shape, "num_attention_heads", "n_head"), _number(shape, "vocab_size")
    kv_heads = shape.get("num_key_value_heads") or heads
    head = shape.get("head_dim") or hidden // heads
    inner = shape.get("intermediate_size") or shape.get("n_inner") or 4 * hidden
    query, key = heads * head, kv_heads * head
    linears = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    linears += [(hidden, inner), (hidden, inner), (inner, hidden)]  # gated, as all recent models
    embeddings = vocab * hidden * (1 if shape.get("tie_word_embeddings", True) else 2)
    norms = (2 * layers + 1) * hidden
    return ModelFacts(
        parameters=stored or embeddings + norms + layers * sum(a * b for a, b in linears),
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        kv_bytes_per_token=2 * layers * key * 2,
        linear_width=layers * sum(a + b for a, b in linears),
        max_positions=shape.get("max_position_embeddings") or shape.get("n_positions"),
    )


def _number(shape: dict[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(shape.get(name), int):
            return int(shape[name])
    raise ValueError(f"config.json has no number `{names[0]}`")


def _stored_parameters(folder: Path) -> int | None:
    """Count the numbers in the safetensors files by their headers; None where there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / Path(name).name for name in names]
    else:
        files = [folder / "model.safetensors"]
    if not all(file.is_file() for file in files):
        return None
    return sum(_header_parameters(file) for file in files)


def _header_parameters(file: Path) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > 100_000_000:  # the format's own limit
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(stream.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


# ---- what a run needs ------------------------------------------------------------------------------------------------


def memory(config: RunConfig, facts: ModelFacts, machine: Machine | None = None) -> Memory:
    """Estimate what the engine and the trainer need on one device, for rows as long as model.max_len allows."""
    machine = machine or find_machine()
    parts: list[Part] = []
    if config.engine.kind is EngineKind.VLLM:
        parts += _engine(config, facts, machine)
    if config.train.kind == "trl":
        parts += _trainer(config, facts)
    needed = Memory(tuple(parts), ())
    return Memory(needed.parts, tuple(_problems(config, facts, machine, needed)))


def _sequence_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Give the KV cache of one sequence of full length, on one device."""
    engine = config.engine
    width = 1 if engine.kv_cache_dtype.startswith("fp8") else DTYPE_BYTES[engine.dtype]
    return (config.model.max_len + FORCED_CHOICE) * facts.kv_bytes_per_token * width / 2 / engine.tensor_parallel


def _engine(config: RunConfig, facts: ModelFacts, machine: Machine) -> list[Part]:
    engine, lora = config.engine, config.train.lora
    width = DTYPE_BYTES[engine.dtype]
    weights = facts.parameters * width / engine.tensor_parallel
    parts = [
        _part("engine", "weights", weights, f"parameters × {width} B / tensor_parallel"),
        _part("engine", "processes and buffers", ENGINE_BYTES, "constant"),
    ]
    if lora:
        adapter = lora.r * facts.linear_width * width
        parts.append(_part("engine", "adapter", adapter, f"r × (inputs + outputs of all linear layers) × {width} B"))
    if not machine.gpus:
        return [*parts, _part("engine", "KV cache", engine.cpu_kv_cache_gib * GIB, "engine.cpu_kv_cache_gib")]
    one = _sequence_bytes(config, facts)
    room = (min(machine.gpus) * engine.gpu_memory - sum(part.gib for part in parts)) * GIB
    cache = max(min(engine.max_num_seqs * one, room), one)
    return [*parts, _part("engine", "KV cache", cache, "max_num_seqs × max_len × bytes a token, at most what is left")]


def _trainer(config: RunConfig, facts: ModelFacts) -> list[Part]:
    train, dpo = config.train, config.method is Method.STAR_DPO
    parts = [_part("trainer", "process and buffers", TRAINER_BYTES, "constant")]
    frozen = facts.parameters * FROZEN_BYTES
    if train.lora:
        adapter = train.lora.r * facts.linear_width * MASTER_BYTES
        parts.append(_part("trainer", "frozen weights", frozen, f"parameters × {FROZEN_BYTES} B"))
        parts.append(
            _part("trainer", "adapter", adapter, f"its parameters × {MASTER_BYTES} B (weight, gradient, Adam)")
        )
    else:
        whole = facts.parameters * MASTER_BYTES
        parts.append(_part("trainer", "weights, gradients, Adam", whole, f"parameters × {MASTER_BYTES} B, fp32"))
        if dpo:
            parts.append(_part("trainer", "reference model", frozen, f"parameters × {FROZEN_BYTES} B"))
    return [*parts, *_batch(config, facts, rows=2 if dpo else 1)]


def _batch(config: RunConfig, facts: ModelFacts, *, rows: int) -> list[Part]:
    """Give what a batch of full-length rows takes; a DPO row is two (chosen, rejected)."""
    tokens = config.train.per_device_batch * config.model.max_len * rows
    how = "per_device_batch × max_len" + (" × 2" if rows == 2 else "")
    kept = tokens * facts.hidden * (4 * facts.layers + LAYER_BYTES)
    formula = f"{how} × hidden × (4 B × layers + {LAYER_BYTES} B), recomputed by layer"
    return [
        _part("trainer", "activations", kept, formula),
        _part("trainer", "logits", tokens * facts.vocab * 8, f"{how} × vocabulary × 8 B (fp32 and their gradient)"),
    ]


def _part(job: str, name: str, size: float, formula: str) -> Part:
    return Part(job, name, size / GIB, formula)


def _problems(config: RunConfig, facts: ModelFacts, machine: Machine, needed: Memory) -> list[str]:
    engine, most = config.engine, facts.max_positions
    problems = []
    length = config.model.max_len + (FORCED_CHOICE if engine.kind is EngineKind.VLLM else 0)
    if most is not None and length > most:
        problems.append(
            f"model.max_len: {config.model.max_len} is too long for the model, which knows {most} positions; "
            f"set {most - length + config.model.max_len} or less."
        )
    if machine.gpus and engine.tensor_parallel > len(machine.gpus):
        problems.append(
            f"engine.tensor_parallel: {engine.tensor_parallel} GPUs are asked for "
            f"and this machine shows {len(machine.gpus)}; lower it."
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
    problems = []
    if needed.engine > usable:
        share = f", {usable:.1f} of it by engine.gpu_memory" if machine.gpus else ""
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
