"""Spell every key of the store and refuse names that could leave their place."""

from __future__ import annotations

import re

from storage.errors import StoreError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

FORMAT = "FORMAT.json"
RUNS = "runs/"
STEPS = "steps/"
CHECKPOINTS = "checkpoints/"
REFS = "refs/"
COLLECTOR = "gc/"


def name(text: str) -> str:
    """Return a name that is safe as one part of a key, or raise StoreError."""
    if not _NAME.fullmatch(text) or ".." in text:
        raise StoreError(f"{text[:80]!r} can't be a name in the store: use 1 to 200 letters, digits, '.', '_' or '-'")
    return text


def digest(text: str) -> str:
    """Return a SHA-256 in hex, or raise StoreError."""
    if not _DIGEST.fullmatch(text):
        raise StoreError(f"{text[:80]!r} is not a SHA-256 in lower-case hex; copy the whole digest")
    return text


def key(text: str) -> str:
    """Return a key every part of which is a safe name, or raise StoreError."""
    for part in text.split("/"):
        name(part)
    return text


def run_folder(run_id: str) -> str:
    """Name the folder of a run, with its slash."""
    return f"runs/{name(run_id)}/"


def run(run_id: str) -> str:
    """Name the frozen config of a run."""
    return f"runs/{name(run_id)}/run.json"


def log(run_id: str, seq: int) -> str:
    """Name a record of a run's log; `seq` counts from 0."""
    return f"runs/{name(run_id)}/log/{seq:08d}.json"


def lease(run_id: str, epoch: int) -> str:
    """Name the beat of the holder of an epoch."""
    return f"runs/{name(run_id)}/lease/{epoch}.json"


def report(run_id: str, file: str) -> str:
    """Name a file of a run's report."""
    return f"runs/{name(run_id)}/report/{name(file)}"


def claim(step_key: str) -> str:
    """Name the advisory claim on a step."""
    return f"steps/{name(step_key)}/claim.json"


def attempt(step_key: str, number: int) -> str:
    """Name the folder of an attempt, with its slash; `number` counts from 0."""
    return f"steps/{name(step_key)}/{number}/"


def manifest(step_key: str, number: int) -> str:
    """Name the commit point of an attempt."""
    return f"{attempt(step_key, number)}manifest.json"


def void(step_key: str, number: int) -> str:
    """Name the mark of an attempt that no longer counts."""
    return f"{attempt(step_key, number)}void.json"


def plan(step_key: str, number: int) -> str:
    """Name the shard plan of an attempt."""
    return f"{attempt(step_key, number)}plan.json"


def shard(step_key: str, number: int, index: int) -> str:
    """Name the commit record of a shard; `index` counts from 0."""
    return f"{attempt(step_key, number)}shards/{index:05d}.json"


def part(step_key: str, number: int, artifact: str, *, index: int, sha256: str) -> str:
    """Name a Parquet file of an artifact by its place and its content."""
    return f"{attempt(step_key, number)}{name(artifact)}/part-{index:05d}-{digest(sha256)}.parquet"


def state(step_key: str, number: int) -> str:
    """Name the record of the state inside an attempt that is not committed yet."""
    return f"{attempt(step_key, number)}state.json"


def state_folder(step_key: str, number: int, generation: str | None = None) -> str:
    """Name the folder of such state, or of one generation of it, with its slash."""
    folder = f"{attempt(step_key, number)}state/"
    return folder if generation is None else f"{folder}{digest(generation)}/"


def checkpoint(checkpoint_digest: str, file: str) -> str:
    """Name a file of a checkpoint."""
    return f"checkpoints/{digest(checkpoint_digest)}/{name(file)}"


def checkpoint_index(checkpoint_digest: str) -> str:
    """Name the index of a checkpoint, whose SHA-256 is the checkpoint's digest."""
    return f"checkpoints/{digest(checkpoint_digest)}/index.json"


def ref(ref_name: str, seq: int) -> str:
    """Name a record of a named pointer."""
    return f"refs/{name(ref_name)}/{seq:08d}.json"


def collection(nonce: str) -> str:
    """Name a plan of the collector."""
    return f"gc/plan-{name(nonce)}.json"


def collector(nonce: str) -> str:
    """Name the lease of a collector."""
    return f"gc/lease-{name(nonce)}.json"


def collecting_step(step_key: str, number: int) -> str:
    """Name the collector's mark on an attempt that it may be about to delete."""
    return f"gc/step-{name(step_key)}-{number}.json"


def collecting(checkpoint_digest: str) -> str:
    """Name the collector's mark on a checkpoint that it may be about to delete."""
    return f"gc/checkpoint-{digest(checkpoint_digest)}.json"


def probe(nonce: str, label: str) -> str:
    """Name a scratch object of the endpoint probe."""
    return f"probe/{name(nonce)}/{name(label)}"
