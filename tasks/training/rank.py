"""Be one of the processes that train together: `python -m tasks.training.rank FOLDER`, started by a launcher."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.errors import StarwheelError, StepFailedError, TransientError
from storage.tables import write_table
from tasks.jobs.lifeline import die_with_owner
from tasks.training.launch import EVENTS, FACTS, LIFELINE, TABLES, read_request

if TYPE_CHECKING:
    from collections.abc import Mapping


def main(folder: str) -> int:
    """Train as the folder's request says; rank 0 leaves tables and facts there, any rank the error it met."""
    place = Path(folder)
    die_with_owner(place / LIFELINE)
    try:
        _train(place)
    except StarwheelError as error:
        return _tell(place, type(error), str(error))
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return _tell(place, TransientError, f"out of memory: {error}")
        # What the others notice when one fails or dies comes from torch as a RuntimeError too.
        lost = isinstance(error, RuntimeError)
        return _tell(place, StepFailedError, f"{type(error).__name__}: {error}", lost=lost)
    return 0


def _train(place: Path) -> None:
    from tasks.training import ranks
    from tasks.training.remote import Mirror
    from tasks.training.resume import TrainerState
    from tasks.training.trainer import train_here

    ranks.join()
    first = ranks.rank() == 0

    def progress(numbers: Mapping[str, Any]) -> None:
        if first:
            with open(place / EVENTS, "a") as events:
                events.write(json.dumps(dict(numbers)) + "\n")

    request, resumed = read_request(place, progress)
    state = TrainerState.of(request.work, request.token)
    result = train_here(request, Mirror(request, state), resumed)
    if first:
        for name in TABLES:
            write_table(place / f"{name}.parquet", getattr(result, name), name)
        (place / FACTS).write_text(json.dumps(result.facts))


def _tell(place: Path, kind: type[StarwheelError], message: str, *, lost: bool = False) -> int:
    """Leave what went wrong to the job; `lost` where it may be the echo of what went wrong in another rank."""
    file = place / f"error-{os.environ['RANK']}.json"
    file.write_text(json.dumps({"kind": kind.__name__, "message": message, "lost": lost}))
    return kind.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
