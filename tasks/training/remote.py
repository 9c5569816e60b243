"""Mirror the trainer's state to a store beside the training, and bring it back on an empty machine."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from tasks.training.portable import pack, unpack
from tasks.training.weights import fresh

if TYPE_CHECKING:
    from pathlib import Path

    from tasks.training.request import TrainRequest
    from tasks.training.resume import TrainerState


class Mirror:
    """Copy complete checkpoints to where the request keeps them beside the training, one at a time.

    A checkpoint waits for the copy of the one before. What fails here, whatever it is (a full disk, a library's own
    error), costs a resume some time and never ends the training: it is told in one sentence.
    """

    def __init__(self, request: TrainRequest, state: TrainerState) -> None:
        self._remote, self._warn = request.remote, request.warn
        self.state = state
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._running: Future[None] | None = None

    @property
    def _folder(self) -> Path:
        return self.state.folder / "portable"

    def restore(self) -> Path | None:
        """Give the newest complete checkpoint, brought here where the store has a newer one than this disk."""
        local = self.state.latest()
        if self._remote is None:
            return local
        here = self.state.step(local) if local else 0
        try:
            kept = self._remote.newest()
            if kept is None or kept["token"] != self.state.token or kept["train_step"] <= here:
                return local
            fresh(self._folder)
            self._remote.fetch(self._folder)
            step = int(kept["train_step"])
            checkpoint = self.state.folder / f"checkpoint-{step}"
            fresh(checkpoint)
            unpack(self._folder, checkpoint)
            self.state.complete(step)
        except Exception as error:
            where = f"train step {here} on this disk" if local else "its first train step"
            self._warn(f"train: the state in the store can't be used ({_reason(error)}); the step starts from {where}")
            return self.state.latest()  # removes what is half-built
        return self.state.latest()

    def saved(self, step: int) -> None:
        """Begin to copy the complete checkpoint of a train step, once the one before is there."""
        if self._remote is not None:
            self._wait()
            self._running = self._pool.submit(self._copy, step)

    def close(self) -> None:
        """Wait for what is under way."""
        self._wait()
        self._pool.shutdown()

    def _copy(self, step: int) -> None:
        assert self._remote is not None
        fresh(self._folder)
        pack(self.state.folder / f"checkpoint-{step}", self._folder)
        self._remote.put(self._folder, {"token": self.state.token, "train_step": step})

    def _wait(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        try:
            running.result()
        except Exception as error:
            self._warn(f"train: the state could not be put into the store ({_reason(error)}); the training goes on")


def _reason(error: Exception) -> str:
    """Give the first half of an error's sentence: what to do about a result doesn't hold for state."""
    return str(error).partition(";")[0] or type(error).__name__
