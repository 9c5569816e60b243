"""A run of a real engine and a real trainer on a tiny model, small enough for a test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests import small

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from configs.run import RunConfig


def described(folder: Path, model: Path, engine: Mapping[str, Any]) -> RunConfig:
    """Describe a run of one iteration whose warm start teaches the tiny model nothing but the form of a verdict."""
    rows = folder / "pairs.jsonl"
    with rows.open("w") as lines:
        for number in range(80):
            label = "AB"[number % 2]
            answer = {"A": "good", "B": "bad"} if label == "A" else {"A": "bad", "B": "good"}
            pair = {
                "prompt": f"question {number}",
                "response_a": answer["A"],
                "response_b": answer["B"],
                "label": label,
            }
            lines.write(json.dumps({**pair, "rationale": f"It is [[{label}]]"}) + "\n")
    return small.config(
        folder,
        iterations=1,
        model={"base": str(model), "max_len": 160},
        data={"sources": [{"name": "made", "path": str(rows)}], "suites": []},
        bootstrap={"rationales": str(rows), "epochs": 40, "learning_rate": 1e-2},
        split={"dev": 0.1, "test": 0.1, "bootstrap": 24},
        sample={"n": 4, "max_tokens": 16, "shard_pairs": 8},
        train={"kind": "trl", "lora": None, "learning_rate": 1e-3, "per_device_batch": 8},
        evaluate={"votes": 1, "dev_votes": 1, "temperature": 0.0, "base": False},
        engine=dict(engine),
    )
