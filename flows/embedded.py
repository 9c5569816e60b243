"""Lend a run a Prefect API: the one that the user's settings name, or a server of its own that ends with the run.

Prefect starts such a server by itself, but it outlives a killed run, and a Ctrl-C in the terminal reaches it before the
run has told it what became of its tasks.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from storage.errors import MissingDependencyError, TransientError
from tasks.jobs.launch import PACKAGES, last_line, start_job
from tasks.jobs.lifeline import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

START_SECONDS = 180  # the first start of all makes the database
EMBEDDED = {
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_UI_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",
}
UNKNOWN_REVISION = "Can't locate revision"  # alembic, of a database that a newer Prefect has migrated


@contextmanager
def prefect_api() -> Iterator[str]:
    """Give the address of the API that flows in this block talk to; raises TransientError when it doesn't answer."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    given = PREFECT_API_URL.value()
    address = given or start_server()
    with temporary_settings({PREFECT_API_URL: address}):
        if given and (failure := get_client(sync_client=True).api_healthcheck()):
            raise TransientError(
                f"Prefect's API at {address} doesn't answer ({failure}); start it with `prefect server start`, "
                "or unset PREFECT_API_URL to run without one"
            )
        try:
            yield address
        except httpx.HTTPError as error:
            raise TransientError(f"lost Prefect's API at {address} ({error!r}); the work done is committed") from error


def start_server() -> str:
    """Start a server on a free port of this machine; it ends with this process, after Prefect's last words to it."""
    from prefect.settings import PREFECT_HOME

    print("starting Prefect's embedded server (about 10 s) …", file=sys.stderr, flush=True)
    stack = ExitStack()
    atexit.register(stack.close)
    log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "prefect.log")
    _, events = stack.enter_context(start_job([sys.executable, "-m", "flows.embedded"], log, PACKAGES))
    with os.fdopen(events) as told:
        port = told.readline().strip()
    try:
        connection = HTTPConnection("127.0.0.1", int(port), timeout=START_SECONDS)
        connection.request("GET", "/api/health")
        answer = f"status {connection.getresponse().status}"
        connection.close()
    except (OSError, HTTPException, ValueError) as error:
        answer = repr(error)
    if answer != "status 200":
        if UNKNOWN_REVISION in log.read_text(errors="replace"):
            raise MissingDependencyError(
                f"Prefect's database in {PREFECT_HOME.value()} was made by a newer Prefect than the installed "
                f"{version('prefect')}; upgrade Prefect, or set PREFECT_HOME to a folder of its own"
            )
        raise TransientError(f"Prefect's embedded server didn't start ({answer}): {last_line(log)}")
    return f"http://127.0.0.1:{port}/api"


def serve(events: str, lifeline: str) -> None:
    """Be the server: bind a free port, tell it, answer until the parent goes."""
    die_with_parent(int(lifeline))
    os.environ.update(EMBEDDED)  # its output is a log, read where it doesn't start
    listener = socket.create_server(("127.0.0.1", 0))
    os.write(int(events), f"{listener.getsockname()[1]}\n".encode())
    import uvicorn

    app = "prefect.server.api.server:create_app"
    config = uvicorn.Config(app, factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    serve(*sys.argv[1:])
