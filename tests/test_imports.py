"""Hold the import graph of CONTRIBUTING.md, and load each entrypoint as a worker and a job machine load it."""

from __future__ import annotations

import ast
import importlib.machinery
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
OURS = ("flows", "tasks", "storage", "configs")
KNOWN = {
    "flows": {"flows", "tasks", "storage", "configs"},
    "tasks": {"tasks", "storage", "configs"},
    "storage": {"storage"},
    "configs": {"configs"},
}
PLAIN_ENGINE = ("tasks.engines.transformers", "tasks.engines.watching")
# Libraries that only these may import, at any depth of the file.
FENCED = {
    "vllm": ("tasks.engines.vllm",),
    "torch": ("tasks.training.", "tasks.models", *PLAIN_ENGINE),
    "trl": ("tasks.training.",),
    "peft": ("tasks.training.", *PLAIN_ENGINE),
    "datasets": ("tasks.training.", "tasks.data.hub"),
    "accelerate": ("tasks.training.",),
    "transformers": ("tasks.training.", "tasks.engines.template", "tasks.models", *PLAIN_ENGINE),
    "fsspec": ("storage.",),
    "s3fs": ("storage.",),
    "botocore": ("storage.",),
    "aiobotocore": ("storage.",),
    "prefect": ("flows.", "tasks.prefect_tasks"),
    "click": ("flows.cli", "flows.look", "flows.keeping", "flows.arguments"),
    "rich": ("flows.terminal",),
    "matplotlib": ("tasks.report",),
    "duckdb": ("tasks.look.",),
}
# Outside tasks/training these are imported where they are used, never when a module is loaded.
LATE = ("torch", "trl", "peft", "transformers", "datasets", "vllm", "huggingface_hub", "matplotlib")
STEPS = {
    f"tasks.{name}"
    for name in (
        "bootstrap",
        "indicators",
        "sample",
        "repair",
        "rationalize",
        "evaluate",
        "parity",
        "score",
        "gate",
        "select",
        "pairs",
        "train",
        "split",
        "models",
    )
}
# What one step's module lends another's: the wording of a question, the rows' form, the names of models and pairs.
SHARED = {
    ("tasks.bootstrap", "tasks.pairs"),
    ("tasks.bootstrap", "tasks.split"),
    ("tasks.indicators", "tasks.pairs"),
    ("tasks.indicators", "tasks.split"),
    ("tasks.evaluate", "tasks.sample"),
    ("tasks.rationalize", "tasks.sample"),
    ("tasks.repair", "tasks.sample"),
    *((step, "tasks.models") for step in STEPS - {"tasks.models"}),
}
# What walks all steps: nothing below it may import it.
WALKERS = (
    "tasks.run",
    "tasks.plan",
    "tasks.earlier",
    "tasks.explain",
    "tasks.forecast",
    "tasks.outcome",
    "tasks.rates",
    "tasks.sizes",
    "tasks.prefect_tasks",
    "tasks.report",
    "tasks.history",
    "tasks.look",
    "tasks.keep",
    "tasks.verify",
    "tasks.jobs",
)


class Import(NamedTuple):
    """One import: who, what, whether the module's loading does it."""

    who: str
    what: str
    at_load: bool


def modules() -> Iterator[tuple[str, Path]]:
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports() -> list[Import]:
    """Parse every import; names taken from a package of ours are counted as its modules where they are."""
    known = {name for name, _ in modules()}
    found = []
    for who, path in modules():
        tree = ast.parse(path.read_text())
        late = {id(one) for body in _late_bodies(tree) for one in ast.walk(body)}
        for node in ast.walk(tree):
            for what in _targets(node, known):
                found.append(Import(who, what, id(node) not in late))
    return found


def _late_bodies(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from node.body


def _targets(node: ast.AST, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in known else str(node.module)


IMPORTS = imports()


def belongs(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or (place.endswith(".") and module.startswith(place)) for place in places)


def broken(rule: str, edges: list[Import]) -> str:
    return rule + ": " + "; ".join(sorted({f"{edge.who} imports {edge.what}" for edge in edges}))


def test_the_sources_are_found() -> None:
    assert len(list(modules())) > 40
    assert Import("flows.cli", "click", True) in IMPORTS
    assert Import("tasks.engines.vllm", "vllm", False) in IMPORTS


def test_packages_know_only_what_is_below_them() -> None:
    wrong = [
        edge
        for edge in IMPORTS
        if edge.what.split(".")[0] in OURS and edge.what.split(".")[0] not in KNOWN[edge.who.split(".")[0]]
    ]
    assert not wrong, broken("flows → tasks → storage, configs", wrong)


@pytest.mark.parametrize("library", FENCED)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = [edge for edge in IMPORTS if edge.what.split(".")[0] == library]
    wrong = [edge for edge in users if not belongs(edge.who, FENCED[library])]
    assert not wrong, broken(f"{library} is for {', '.join(FENCED[library])}", wrong)


def test_heavy_libraries_load_late() -> None:
    wrong = [
        edge
        for edge in IMPORTS
        if edge.at_load and edge.what.split(".")[0] in LATE and not edge.who.startswith("tasks.training.")
    ]
    assert not wrong, broken("only tasks/training loads these at the top of a file", wrong)


def test_the_trainers_load_only_in_a_job() -> None:
    light = {"tasks.training", "tasks.training.request", "tasks.training.order"}
    wrong = [
        edge
        for edge in IMPORTS
        if edge.what.startswith("tasks.training")
        and not edge.who.startswith("tasks.training")
        and edge.at_load
        and edge.what not in light
    ]
    assert not wrong, broken("tasks/training is imported by functions of the job entry", wrong)


def test_steps_share_only_what_is_named_here() -> None:
    edges = [edge for edge in IMPORTS if edge.who in STEPS and edge.what in STEPS]
    wrong = [edge for edge in edges if (edge.who, edge.what) not in SHARED]
    assert not wrong, broken("a step's module doesn't import another's", wrong)


def test_steps_do_not_know_who_walks_them() -> None:
    below = (*STEPS, "tasks.step", "tasks.generation", "tasks.judge.", "tasks.data.", "tasks.engines.")
    wrong = [
        edge
        for edge in IMPORTS
        if belongs(edge.who, below) and any(edge.what == one or edge.what.startswith(f"{one}.") for one in WALKERS)
    ]
    assert not wrong, broken("steps are below run, plan, report and jobs", wrong)


def test_the_pure_parts_are_leaves_of_tasks() -> None:
    """judge, data, engines and training decide and compute; they know no step, no store and no context."""
    wrong = [
        edge
        for edge in IMPORTS
        if edge.who.startswith(("tasks.judge", "tasks.data", "tasks.engines", "tasks.training"))
        and (
            edge.what in STEPS
            or edge.what in {"tasks.step", "tasks.generation", "storage.store", "storage.attempt", "storage.runlog"}
        )
    ]
    assert not wrong, broken("pure parts are leaves", wrong)


def test_no_file_of_flows_shadows_a_module() -> None:
    """A worker puts flows/ at the front of sys.path, where `types.py` or `datasets.py` would be found first."""
    stems = {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__"}
    assert not stems & set(sys.stdlib_module_names)
    elsewhere = [one for one in sys.path if one and not Path(one).resolve().is_relative_to(ROOT)]
    finder = importlib.machinery.PathFinder
    assert {stem for stem in stems if finder.find_spec(stem, elsewhere) is not None} == set()
    assert not stems & set(OURS)


def python(code: str, *, blocked: tuple[str, ...] = (), arguments: tuple[str, ...] = ()) -> str:
    """Run code in a fresh interpreter where some modules can't be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    done = subprocess.run(
        [sys.executable, "-c", block + code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("entrypoint", ["flows/star.py:star"])
def test_a_worker_can_load_the_flow(entrypoint: str) -> None:
    code = """
sys.path.insert(0, "flows")
from prefect.flows import load_flow_from_entrypoint
flow = load_flow_from_entrypoint(sys.argv[1], use_placeholder_flow=False)
print(flow.name, list(flow.parameters.properties))
"""
    assert python(code, arguments=(entrypoint,)) == "star ['config', 'overrides', 'run_id', 'store', 'freed']\n"


def test_the_deployment_names_the_entrypoint_that_is_loaded_here() -> None:
    import yaml

    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert {one["entrypoint"] for one in deployments} == {"flows/star.py:star"}


def test_jobs_run_where_no_prefect_is_installed() -> None:
    heavy = """
import tasks.jobs.entry
print([name for name in ("torch", "vllm", "trl", "transformers", "s3fs", "click", "rich") if name in sys.modules])
"""
    assert python(heavy, blocked=("prefect",)) == "[]\n"


def test_the_parent_of_a_run_never_loads_torch_or_vllm() -> None:
    """All that `run` imports, Prefect included."""
    code = """
import flows.cli, flows.star, flows.embedded, configs.budget, tasks.plan
print([name for name in ("torch", "vllm", "trl", "transformers", "peft") if sys.modules.get(name)])
"""
    assert python(code, blocked=("torch", "vllm")) == "[]\n"
