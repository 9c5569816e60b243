"""Run the Prefect flow on an embedded server, a server process and a worker; kill it, interrupt it, resume it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import small
from conftest import free_port
from outer import (
    STARWHEEL,
    Session,
    command_line,
    config_file,
    described,
    log_records,
    results,
    steps_logged,
    wait_until,
)

from flows.iteration import star
from storage.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PREFECT = (sys.executable, "-m", "prefect")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Run it in this process, without Prefect, and give what it makes when nothing happens to it."""
    store, run = small.start(described(tmp_path_factory.mktemp("undisturbed")))
    star(run)
    return results(store, run.run_id)


class Server:
    """A `prefect server start` process and its API."""

    def __init__(self, session: Session, port: int) -> None:
        self.session, self.port = session, port
        self.url = f"http://127.0.0.1:{port}/api"

    def ask(self, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request(
            "GET" if body is None else "POST", f"/api/{path}", data, {"content-type": "application/json"}
        )
        return json.loads(connection.getresponse().read())

    def answers(self) -> bool:
        try:
            return bool(self.ask("health"))
        except OSError:
            return False

    def flow_runs(self, **wanted: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask(
            "flow_runs/filter", {"flow_runs": wanted, "sort": "EXPECTED_START_TIME_ASC"}
        )
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a Prefect server on a free port; what is called in its session uses it."""
    port = free_port()
    session = Session(tmp_path_factory.mktemp("server"), {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"})
    found = Server(session, port)
    process = session.start(
        *PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui", log="server"
    )
    try:
        wait_until(process, found.answers, "the server")
        yield found
    finally:
        process.terminate()
        process.wait(30)
        session.end()


@pytest.fixture(scope="module")
def worker(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """Deploy prefect.yaml with a cron of every minute and start a worker that takes one run."""
    session = server.session
    config = config_file(tmp_path_factory.mktemp("deployed"))
    session.call(*PREFECT, "work-pool", "create", "starwheel", "--type", "process", log="pool")
    deploy = (
        *PREFECT,
        "--no-prompt",
        "deploy",
        "--name",
        "nightly",
        "--cron",
        "* * * * *",
        "--param",
        f"config={config}",
    )
    session.call(*deploy, log="deploy", cwd=ROOT)
    deadline = time.monotonic() + 60
    while not server.flow_runs(state={"type": {"any_": ["SCHEDULED"]}}):
        assert time.monotonic() < deadline, "the server scheduled no run of an active cron (is SQLAlchemy below 2.1?)"
        time.sleep(0.2)
    start = (
        *PREFECT,
        "worker",
        "start",
        "--pool",
        "starwheel",
        "--run-once",
        "--limit",
        "1",
        "--prefetch-seconds",
        "90",
    )
    process = session.start(*start, log="worker")
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def test_a_database_of_a_newer_prefect_is_one_sentence(tmp_path: Path) -> None:
    """Two environments with different Prefects share ~/.prefect: the older one can't read what the newer migrated."""
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database, database:
        database.execute("create table alembic_version (version_num varchar(32) not null)")
        database.execute("insert into alembic_version values ('ffffffffffff')")
    code = "from flows.embedded import start_server; start_server()"
    environ = {**os.environ, "PREFECT_HOME": str(tmp_path), "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    said = (
        f"Prefect's database in {tmp_path} was made by a newer Prefect than the installed {version('prefect')}; upgrade"
    )
    assert said in done.stderr.splitlines()[-1]


def test_the_embedded_server_ends_with_the_run(server: Server, tmp_path: Path, undisturbed: dict[Any, Any]) -> None:
    """SIGKILL, then Ctrl-C, then a good end: nothing is left running, and only Prefect's own folder in the home."""
    session = Session(tmp_path)
    copy_database(server.session.home, session.home)
    config = config_file(tmp_path / "run")
    store, work = tmp_path / "run" / "store", tmp_path / "run" / "work"
    try:
        process = session.start(*STARWHEEL, "run", str(config), log="killed")
        wait_until(process, lambda: list(work.glob("*/jobs/*-split.json")), "the split")
        assert any("flows.embedded" in command_line(one) for one in session.processes())
        process.kill()
        process.wait()
        assert session.left_over() == []

        (run_id,) = open_store(str(store)).runs()
        process = session.start(*STARWHEEL, "resume", "last", "--store", str(store), log="interrupted")
        wait_until(process, lambda: (0, "evaluate") in steps_logged(store, run_id), "the first evaluation")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group gets it
        assert process.wait(120) == 130
        told = session.told("interrupted")
        assert told.rstrip("\n").endswith(
            f"\n{run_id} stopped; what is committed stays. Go on with: starwheel resume {run_id} --store {store}"
        )
        assert "Traceback" not in told
        assert session.left_over() == []

        printed = session.call(*STARWHEEL, "resume", run_id, "--store", str(store), log="resumed")
        assert "checkpoint 1" in printed
        assert session.left_over() == []
    finally:
        session.end()

    assert results(open_store(str(store)), run_id) == undisturbed
    assert sorted(path.name for path in session.home.iterdir() if path.name not in {".cache", ".config"}) == [
        ".prefect"
    ]
    _check_database(session.home / ".prefect", store, run_id)


def copy_database(home: Path, other: Path) -> None:
    """Give a home the database of another: making one takes Prefect many seconds."""
    (other / ".prefect").mkdir(parents=True)
    source = sqlite3.connect(home / ".prefect" / "prefect.db")
    target = sqlite3.connect(other / ".prefect" / "prefect.db")
    source.backup(target)
    source.close()
    target.close()


def _check_database(prefect_home: Path, store: Path, run_id: str) -> None:
    """Prefect's history holds each step with its manifest's key, the table, and no result of a task."""
    assert not (prefect_home / "storage").exists()
    with closing(sqlite3.connect(prefect_home / "prefect.db")) as database:
        states = [state for (state,) in database.execute("select state_type from flow_run order by created")]
        assert states[1:] == ["CRASHED", "COMPLETED"]
        told = "\n".join(message for (message,) in database.execute("select message from log"))
        tables = [
            json.loads(json.loads(data))
            for (data,) in database.execute("select data from artifact where type = 'table'")
        ]
    steps = [one for one in log_records(store, run_id) if one["kind"] == "step"]
    assert len(steps) > 20
    for one in steps:
        assert f"manifest steps/{one['key']}/{one['attempt']}/manifest.json" in told
    assert {row["judge"] for row in tables[0]} == {"checkpoint 0", "checkpoint 1"}


KILLS = {
    "split": lambda jobs, steps: jobs[-1:] == ["split"],
    "session, evaluate": lambda jobs, steps: (0, "evaluate") in steps,
    "session, sample": lambda jobs, steps: (0, "gate") in steps,
    "select and pairs": lambda jobs, steps: (1, "select") in steps,
    "train": lambda jobs, steps: jobs[-1:] == ["train"],
    "last session": lambda jobs, steps: (1, "evaluate") in steps,
}


def test_six_kills(
    server: Server, worker: subprocess.Popen[bytes], tmp_path: Path, undisturbed: dict[Any, Any]
) -> None:
    """One SIGKILL in each step of one run; `worker` waits for its minute meanwhile."""
    session = Session(tmp_path, server.session.changes)
    store, work = tmp_path / "run" / "store", tmp_path / "run" / "work"
    command = (*STARWHEEL, "run", str(config_file(tmp_path / "run")))
    committed: set[Any] = set()
    try:
        for number, (where, there) in enumerate(KILLS.items()):
            before = set(work.glob("*/jobs/*.json"))
            process = session.start(*command, log=f"kill-{number}")
            if number == 0:
                wait_until(process, lambda: list((store / "runs").glob("*/run.json")), "the run")
                (run_id,) = open_store(str(store)).runs()
                command = (*STARWHEEL, "resume", run_id, "--store", str(store))

            def seen() -> bool:
                jobs = sorted(path.stem[4:] for path in set(work.glob("*/jobs/*.json")) - before)  # noqa: B023
                return bool(there(jobs, steps_logged(store, run_id)))  # noqa: B023

            wait_until(process, seen, where)
            process.kill()
            assert process.wait() == -signal.SIGKILL
            assert session.left_over() == [], f"orphans after a kill in {where}"
            logged = set(steps_logged(store, run_id))
            assert committed <= logged
            committed = logged
        session.call(*command, log="resumed")
        assert session.left_over() == []
    finally:
        session.end()
    assert results(open_store(str(store)), run_id) == undisturbed
    opened = [one for one in log_records(store, run_id) if one["kind"] == "opened"]
    assert len(opened) == len(KILLS) + 1
    assert all(one["attempt"] == 0 for one in log_records(store, run_id) if one["kind"] == "step")


def test_a_killed_job_is_retried_and_all_is_visible_in_the_api(
    server: Server, tmp_path: Path, undisturbed: dict[Any, Any]
) -> None:
    session = Session(tmp_path, server.session.changes)
    config = config_file(tmp_path / "run")
    quick = "import tasks.prefect_tasks as tasks; tasks.RETRY_SECONDS = 0; from flows.cli import main; main()"
    try:
        process = session.start(sys.executable, "-c", quick, "run", str(config), log="retried")

        def job() -> list[Any]:
            return [one for one in session.processes() if "-session.json" in command_line(one)]

        wait_until(process, job, "the session's job")[0].kill()
        assert process.wait(240) == 0, session.told("retried")
        assert session.left_over() == []
    finally:
        session.end()
    told = session.told("retried")
    assert "failed  session of checkpoint 0: the session job ended with code -9" in told
    assert "Traceback" not in told
    store = open_store(str(tmp_path / "run" / "store"))
    (run_id,) = store.runs()
    assert results(store, run_id) == undisturbed

    (flow_run,) = [one for one in server.flow_runs() if one["parameters"].get("run_id") == run_id]
    assert flow_run["state"]["type"] == "COMPLETED"
    assert flow_run["state"]["data"] is None or "storage_key" not in flow_run["state"]["data"]
    body = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}, "limit": 200}
    tasks = {one["name"]: one for one in server.ask("task_runs/filter", body)}
    assert {one["state"]["type"] for one in tasks.values()} == {"COMPLETED"}
    assert tasks["session of checkpoint 0"]["run_count"] == 2
    shown = {f"{iteration} {step} {label}".strip() for iteration, step, label in undisturbed}
    assert shown <= {*tasks}
    logs = server.ask("logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}, "limit": 200})
    lines = {one["message"] for one in logs}
    assert {f"manifest steps/{key}/0/manifest.json" for key, _, _ in undisturbed.values()} <= lines
    artifact = server.ask(f"artifacts/{run_id}-results/latest")
    assert artifact["type"] == "table"
    assert artifact["flow_run_id"] == flow_run["id"]


def test_a_worker_runs_the_deployment_by_its_cron(server: Server, worker: subprocess.Popen[bytes]) -> None:
    assert worker.wait(300) == 0, server.session.told("worker")
    taken = [one for one in server.flow_runs() if one["deployment_id"] and one["state"]["type"] != "SCHEDULED"]
    assert [one["state"]["type"] for one in taken] == ["COMPLETED"], server.session.told("worker")
    assert taken[0]["auto_scheduled"]


def test_an_api_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    session = Session(tmp_path, {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"})
    process = session.start(*STARWHEEL, "run", str(config_file(tmp_path / "run")))
    assert process.wait(120) == 4
    told = session.told().splitlines()
    assert told[-1].startswith("starwheel: Prefect's API at http://127.0.0.1:")
    assert "or unset PREFECT_API_URL" in told[-1]
    assert "Traceback" not in session.told()
    assert session.left_over() == []
