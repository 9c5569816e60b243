"""Say which of the processes that train together this one is; alone, it is rank 0 of one."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from tasks.training.weights import on_cuda


def join() -> None:
    """Meet the others, as the launcher's environment says; once, before anything is loaded."""
    if on_cuda():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo beside nccl: whole weights are gathered on the CPU
    dist.init_process_group("cuda:nccl,cpu:gloo" if on_cuda() else "gloo")


def count() -> int:
    """Count the processes."""
    return int(dist.get_world_size()) if dist.is_initialized() else 1


def rank() -> int:
    """Give this process's number."""
    return int(dist.get_rank()) if dist.is_initialized() else 0


def gather(value: Any) -> list[Any]:
    """Give every process's value to all, in the order of the ranks; every process must call it."""
    if count() == 1:
        return [value]
    found: list[Any] = [None] * count()
    dist.all_gather_object(found, value)
    return found


def wait() -> None:
    """Wait until every process is here."""
    if count() > 1:
        dist.barrier()
