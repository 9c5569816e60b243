"""The Prefect flow of a run: `flows/star.py:star` is its deployment's entrypoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import flow
from prefect.artifacts import create_table_artifact

from configs.load import load_config
from flows.iteration import star as loop
from flows.terminal import progress_listener
from storage.store import open_store
from tasks.jobs.launch import ProcessLauncher
from tasks.outcome import freeze_plan
from tasks.prefect_tasks import PrefectRun
from tasks.report import make_report, plot, results_table, write_report
from tasks.run import create_run, open_run

if TYPE_CHECKING:
    from collections.abc import Sequence


@flow(name="star", validate_parameters=False, persist_result=False, log_prints=False)
def star(
    config: str = "", overrides: Sequence[str] = (), run_id: str = "", store: str = "", freed: int = 0
) -> dict[str, Any]:
    """Run the loop: a new run of a config (a preset or a YAML file), or the rest of the run `run_id` in `store`.

    `freed` is the epoch of that run whose holder the caller has seen gone, so that it isn't waited for again.
    """
    if run_id:
        opened = open_store(store, create=False)
    else:
        described = load_config(config, overrides)
        opened = open_store(described.store)
        run_id = create_run(opened, described)
        freeze_plan(opened, run_id, described, loop)
    listen = progress_listener()
    with open_run(opened, run_id, ProcessLauncher, kind=PrefectRun, listen=listen, freed=freed) as run:
        judge = loop(run)
        report = make_report(opened, run_id)
        files = write_report(opened, report, plot(report), run.work / "report")
        end = "done" if judge.number == run.config.iterations else f"stopped by the gate at checkpoint {judge.number}"
        run.close(end)
    create_table_artifact(
        results_table(report), key=f"{run_id.lower()}-results", description="Accuracy with 95 % intervals"
    )
    return {
        "run_id": run_id,
        "checkpoint": judge.number,
        "model": judge.model.digest,
        "report": [str(one) for one in files],
    }
