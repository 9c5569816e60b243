"""Keep the trainer's state on local disk: complete or not at all, and bound to what is trained."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.digest import digest_bytes, digest_file

if TYPE_CHECKING:
    from pathlib import Path

MARKER = "complete.json"
KEEP = 2
_NAME = re.compile(r"checkpoint-([0-9]+)")


@dataclass(frozen=True)
class TrainerState:
    """Hold the folder of one training's state, `checkpoint-<train_step>` each.

    A checkpoint counts if its marker, written last, names the digest of every file in it and the training's token.
    """

    folder: Path
    token: str

    @classmethod
    def of(cls, work: Path, token: str) -> TrainerState:
        """Name the state of a token, as it is."""
        return cls(work / "trainer" / digest_bytes(token.encode())[:32], token)

    @classmethod
    def open(cls, work: Path, token: str, *, keep: bool) -> TrainerState:
        """Open the state of a token and remove that of all others (and its own, unless `keep`)."""
        state = cls.of(work, token)
        for other in state.folder.parent.glob("*"):
            if other != state.folder or not keep:
                shutil.rmtree(other)
        state.folder.mkdir(parents=True, exist_ok=True)
        return state

    def latest(self) -> Path | None:
        """Give the newest complete checkpoint; the incomplete ones are removed."""
        for checkpoint in self._checkpoints():
            if self._complete(checkpoint):
                return checkpoint
            shutil.rmtree(checkpoint)
        return None

    def step(self, checkpoint: Path) -> int:
        """Give the train step of a checkpoint."""
        return int(checkpoint.name.rpartition("-")[2])

    def complete(self, step: int) -> None:
        """Mark the checkpoint of a step as whole, then remove all but the newest two."""
        folder = self.folder / f"checkpoint-{step}"
        files = {path.name: digest_file(path) for path in sorted(folder.iterdir()) if path.name != MARKER}
        marker = folder / f".{MARKER}"
        marker.write_text(json.dumps({"token": self.token, "files": files}))
        os.replace(marker, folder / MARKER)
        for old in self._checkpoints()[KEEP:]:
            shutil.rmtree(old)

    def _checkpoints(self) -> list[Path]:
        """List the checkpoints, newest step first."""
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def _complete(self, checkpoint: Path) -> bool:
        try:
            marker = json.loads((checkpoint / MARKER).read_text())
            names = {path.name for path in checkpoint.iterdir()} - {MARKER}
            return (
                marker["token"] == self.token
                and names == set(marker["files"])
                and all(digest_file(checkpoint / name) == digest for name, digest in marker["files"].items())
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False
