"""Make small training rows and requests for the tests of the trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from configs.run import LoraConfig, TrainConfig
from storage.schema import SCHEMAS
from tasks.training.request import ModelFolder, TrainRequest

if TYPE_CHECKING:
    from pathlib import Path

KWARGS = {"date_string": "26 Jul 2024", "enable_thinking": False}


def _said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def _ids(count: int) -> dict[str, list[Any]]:
    return {
        "pair_id": [f"p{row}" for row in range(count)],
        "checkpoint": ["c" * 64] * count,
        "order": ["ab"] * count,
        "prompt": [_said("user", "Which answers better? " + "x " * (row % 7)) for row in range(count)],
    }


def right(row: int) -> str:
    return "Because " + "it is short " * (row % 3) + f"[[{'AB'[row % 2]}]]"


def sft_rows(count: int) -> pa.Table:
    columns = {
        **_ids(count),
        "sample": [0] * count,
        "hinted": [False] * count,
        "completion": [_said("assistant", right(row)) for row in range(count)],
    }
    return pa.table(columns, schema=SCHEMAS["sft"])


def dpo_rows(count: int) -> pa.Table:
    columns = {
        **_ids(count),
        "chosen_sample": [0] * count,
        "chosen_hinted": [False] * count,
        "rejected_sample": [1] * count,
        "rejected_hinted": [False] * count,
        "chosen": [_said("assistant", right(row)) for row in range(count)],
        "rejected": [_said("assistant", "No " + "way " * (row % 4) + f"[[{'BA'[row % 2]}]]") for row in range(count)],
    }
    return pa.table(columns, schema=SCHEMAS["dpo"])


def settings(**changes: Any) -> TrainConfig:
    adapter = LoraConfig(r=4, alpha=8, dropout=0.0)
    given = {"lora": adapter, "learning_rate": 1e-2, "epochs": 2, "batch_size": 8, "per_device_batch": 4}
    return TrainConfig.model_validate({**given, **changes})


def request(base: Path, place: Path, **changes: Any) -> TrainRequest:
    dpo = changes.get("method") == "star-dpo"
    given: dict[str, Any] = {
        "method": "star-sft",
        "rows": dpo_rows(21) if dpo else sft_rows(21),
        "start": ModelFolder(base),
        "reference": ModelFolder(base) if dpo else None,
        "config": settings(),
        "max_len": 128,
        "seed": 3,
        "template_kwargs": KWARGS,
        "work": place / "work",
        "token": "a token",
        "out": place / "out",
        "progress": lambda numbers: None,
    }
    return TrainRequest(**{**given, **changes})
