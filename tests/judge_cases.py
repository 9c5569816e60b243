"""Small tables for the tests of the judge's pure core, and the golden files its outputs are held against."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.run import FewShot, PromptConfig
from storage.schema import SCHEMAS

DATA = Path(__file__).parent / "data"
_FRAME = "Question: {prompt}\nA: {response_a}\nB: {response_b}\nEnd with [[A]] or [[B]]."
PROMPT = PromptConfig(system="You judge.", user=_FRAME)
SHOT = FewShot(prompt="1+1?", response_a="2", response_b="3", rationale="A adds up.", verdict="A")


def pair(name: str, gold: str = "A", **other: Any) -> dict[str, Any]:
    """Make a row of `pairs`."""
    row = {
        "pair_id": name,
        "prompt": [{"role": "user", "content": f"question {name}"}],
        "response_a": f"first of {name}",
        "response_b": f"second of {name}",
        "gold": gold,
        "group": name,
        "source": "cases",
        "subset": "all",
    }
    return row | other


def completion(name: str, text: str, **other: Any) -> dict[str, Any]:
    """Make a row of `completions`."""
    row = {
        "pair_id": name,
        "checkpoint": "c0",
        "order": "ab",
        "sample": 0,
        "hinted": False,
        "text": text,
        "finish_reason": "stop",
        "n_tokens": len(text.split()),
        "logprob": -1.0,
        "prob_a": None,
        "error": None,
    }
    return row | other


def judgment(name: str, status: str, **other: Any) -> dict[str, Any]:
    """Make a row of `judgments`; gold is A as shown, so right picks A and wrong picks B."""
    row = {
        "pair_id": name,
        "checkpoint": "c0",
        "order": "ab",
        "sample": 0,
        "hinted": False,
        "verdict": {"correct": "A", "wrong": "B"}.get(status),
        "status": status,
        "rationale_end": None,
        "n_tokens": 10,
        "prob_gold": None,
    }
    return row | other


def table(artifact: str, rows: list[dict[str, Any]]) -> pa.Table:
    """Make a table of an artifact's schema."""
    return pa.Table.from_pylist(rows, schema=SCHEMAS[artifact])


def ids(rows: pa.Table) -> list[tuple[str, str, int]]:
    """List pair, order and sample of a table's rows."""
    columns = (rows.column(name).to_pylist() for name in ("pair_id", "order", "sample"))
    return list(zip(*columns, strict=True))


def fixed_case() -> tuple[pa.Table, pa.Table]:
    """Give the pairs and completions that the golden files are made from: 12 pairs, both orders, 4 samples."""
    texts = ("A is right. [[A]]", "B is right. [[B]] indeed", "Neither.", "So [[A]] or [[B]]?", "[[tie]]", "Long [[A]]")
    pairs, completions = [], []
    for number in range(12):
        name = f"p{number:02d}"
        pairs.append(pair(name, "AB"[number % 2], group=f"g{number // 2}", subset=f"s{number % 3}"))
        for order in ("ab", "ba"):
            for sample in range(4):
                at = number * 7 + sample * (3 + number % 4) + (order == "ba") * (1 + number % 3)
                kind = (0, 0, 1, 1, 0, 1, 2, 0, 3, 1, 4, 5, 1)[at % 13]
                reason = "length" if kind == 5 else "stop"
                read = None if number == 11 else (at * 37 % 101) / 100
                row = completion(name, texts[kind], order=order, sample=sample, finish_reason=reason, prob_a=read)
                completions.append(row)
    return table("pairs", pairs), table("completions", completions)


def check_golden(core: str, version: int, output: Any) -> None:
    """Compare an output with its golden file; GOLDEN_WRITE=1 writes a new version's, never another of the same."""
    path = DATA / f"golden_{core}.json"
    known = json.loads(path.read_text()) if path.exists() else None
    same = known is not None and known["version"] == version and _near(known["output"], json.loads(json.dumps(output)))
    if os.environ.get("GOLDEN_WRITE") and (known is None or known["version"] != version):
        path.write_text(json.dumps({"version": version, "output": output}, indent=1) + "\n")
    elif not same:
        pytest.fail(f"{core} gives another output: bump VERSION, then write {path.name} anew with GOLDEN_WRITE=1")


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_near, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_near(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
