"""Carry a trainer's checkpoint past a store: tensors as safetensors, the rest as JSON, its pickles left at home.

The libraries keep optimizer, schedule and random numbers in pickles. They are read where they were written, and made
anew from safetensors and JSON where the training goes on.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.trainer_pt_utils import safe_globals

from storage.errors import StepFailedError
from tasks.training.resume import MARKER

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Tensors = dict[str, torch.Tensor]

PICKLES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
TENSORS, REST = "trainer.safetensors", "trainer.json"
_PLAIN = (".safetensors", ".json")
_LEFT_OUT = (MARKER, "README.md")  # the marker is made anew, the card says nothing


def pack(checkpoint: Path, out: Path) -> None:
    """Write a checkpoint of the trainer into an empty folder without pickles; StepFailedError for what it can't be."""
    tensors: Tensors = {}
    rest = {}
    for path in sorted(checkpoint.iterdir()):
        if path.name in PICKLES:
            with safe_globals():
                held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            rest[path.name] = _to_json(held, tensors)
        elif path.name.endswith(_PLAIN):
            if path.name != MARKER:
                _link(path, out / path.name)
        elif path.name not in _LEFT_OUT:
            raise StepFailedError(
                f"{path} is no file that a store may hold, so this training can't go on elsewhere; "
                "set train.resume to local"
            )
    save_file(tensors, out / TENSORS)
    (out / REST).write_text(json.dumps(rest, allow_nan=False))


def unpack(folder: Path, checkpoint: Path) -> None:
    """Rebuild a checkpoint of the trainer from what `pack` wrote; ValueError, KeyError or TypeError for anything else.

    The marker that makes it count is left to the caller.
    """
    tensors = load_file(folder / TENSORS)
    rest = json.loads((folder / REST).read_text())
    if set(rest) - set(PICKLES):
        raise ValueError(f"{sorted(set(rest) - set(PICKLES))[0]} is no file of a trainer's state")
    for name, held in rest.items():
        torch.save(_from_json(held, tensors), checkpoint / name)
    for path in folder.iterdir():
        if path.name not in (TENSORS, REST):
            _link(path, checkpoint / path.name)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _to_json(value: Any, tensors: Tensors) -> Any:
    """Spell a value of dicts, lists, tuples, numbers and texts; tensors are put aside under a number."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": _put(value.detach(), tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":  # unsigned 32 bit fits, and torch has few such types
        return {"array": _put(torch.from_numpy(value.astype(np.int64)), tensors), "dtype": str(value.dtype)}
    if isinstance(value, dict):
        return {"dict": [[_to_json(key, tensors), _to_json(one, tensors)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        items = [_to_json(one, tensors) for one in value]
        return items if isinstance(value, list) else {"tuple": items}
    raise StepFailedError(
        f"the trainer's state holds a {type(value).__name__}, which can't be stored without a pickle; "
        "set train.resume to local"
    )


def _put(tensor: torch.Tensor, tensors: Tensors) -> str:
    name = f"{len(tensors):06d}"
    tensors[name] = tensor.contiguous()
    return name


def _from_json(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, list):
        return [_from_json(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    rebuild: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "tensor": tensors.__getitem__,
        "array": lambda name: tensors[name].numpy().astype(np.dtype(value["dtype"])),
        "dict": lambda items: {_from_json(key, tensors): _from_json(one, tensors) for key, one in items},
        "tuple": lambda items: tuple(_from_json(one, tensors) for one in items),
    }
    return rebuild[kind](value[kind])
