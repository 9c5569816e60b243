"""Show a run in Prefect: each call a task with retries, each committed step a task with its manifest's reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage.errors import TransientError
from tasks.run import Checkpoint, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prefect.client.schemas.objects import State

    from storage.manifest import Manifest
    from tasks.jobs.session import SessionResult
    from tasks.models import Model
    from tasks.step import Event

P = ParamSpec("P")
R = TypeVar("R")

RETRIES = 2
RETRY_SECONDS = 10


@task(name="committed", cache_policy=NO_CACHE, persist_result=False)
def committed(reference: dict[str, Any]) -> dict[str, Any]:
    """Show a committed step; the reference names its manifest in the store."""
    get_run_logger().info("manifest steps/%(key)s/%(attempt)s/manifest.json", reference)
    return reference


class PrefectRun(Run):
    """Do the same steps, each inside a Prefect task. Prefect retries and shows; it holds no data."""

    def base(self) -> Model:
        """Put the base model into the store."""
        return self._task("base", super().base)()

    def split(self, base: Model) -> Manifest:
        """Read the pairs and cut them."""
        return self._task("split", super().split)(base)

    def bootstrap(self, data: Manifest) -> Manifest:
        """Build the warm start's rows."""
        return self._task("bootstrap", super().bootstrap)(data)

    def session(
        self, data: Manifest, judge: Checkpoint, base: Model, *, before: Manifest | None, sample: bool
    ) -> SessionResult:
        """Ask a checkpoint everything in one engine start."""
        return self._task(f"session of checkpoint {judge.number}", super().session)(
            data, judge, base, before=before, sample=sample
        )

    def select(self, iteration: int, data: Manifest, completions: Mapping[str, Manifest]) -> Manifest:
        """Keep what may be trained on."""
        return self._task(f"select {iteration}", super().select)(iteration, data, completions)

    def pairs(
        self,
        iteration: int,
        data: Manifest,
        completions: Mapping[str, Manifest],
        *,
        selected: Manifest,
        earlier: Manifest | None,
    ) -> Manifest:
        """Build the training rows."""
        return self._task(f"pairs {iteration}", super().pairs)(
            iteration, data, completions, selected=selected, earlier=earlier
        )

    def indicators(self, iteration: int, data: Manifest, *, earlier: Manifest | None) -> Manifest:
        """Build the training rows of the verdicts alone."""
        return self._task(f"indicators {iteration}", super().indicators)(iteration, data, earlier=earlier)

    def train(self, iteration: int, rows: Manifest, base: Model, previous: Model) -> Checkpoint:
        """Train a checkpoint."""
        return self._task(f"train {iteration}", super().train)(iteration, rows, base, previous)

    def show_step(self, event: Event) -> None:
        """Show a committed step as a task."""
        name = " ".join(str(event[part]) for part in ("iteration", "step", "label") if event[part] != "")
        committed.with_options(task_run_name=name)(dict(event))

    def _task(self, name: str, method: Callable[P, R]) -> Callable[P, R]:
        def is_transient(_task: Any, _run: Any, state: State[Any]) -> bool:
            error = state.result(raise_on_failure=False)
            if not isinstance(error, TransientError):
                return False
            self._listen({"event": "failed", "task": name, "message": str(error)})
            return True

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return method(*args, **kwargs)

        return task(
            name=name.split(" ")[0],
            task_run_name=name,
            retries=RETRIES,
            retry_delay_seconds=RETRY_SECONDS,
            retry_condition_fn=is_transient,
            cache_policy=NO_CACHE,
            persist_result=False,
        )(call)
