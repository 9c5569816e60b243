"""Reuse by content: the same work is never done twice, and what could change a result is never taken for the same."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import annotated_types
import pydantic
import pytest
import small

import tasks.jobs.entry
import tasks.training.scripted
from configs.run import HardwareConfig, NotInKey, RunConfig, Section
from flows.iteration import star
from storage.digest import digest_json
from storage.manifest import Artifact, Manifest
from storage.schema import SCHEMAS, empty
from tasks.engines.scripted import ScriptedEngine
from tasks.plan import make_plan
from tasks.run import DryRun, Run
from tasks.step import Context

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa
    from pydantic.fields import FieldInfo

    from storage.store import Store
    from tasks.engines.base import Request

pytestmark = pytest.mark.usefixtures("no_fsync")

ONE_ITERATION = {"iterations": 1, "evaluate": {"base": False}}


@dataclass
class Done:
    """Hold a run's end: its steps by (iteration, name, label), and how many engines and trainers it started."""

    store: Store
    run: Run
    steps: dict[tuple[int, str, str], dict[str, Any]]
    engines: int
    trainers: int

    def computed(self) -> set[tuple[int, str]]:
        return {(one[0], one[1]) for one, event in self.steps.items() if not event["reused"]}

    def keys(self, *names: str) -> dict[tuple[int, str, str], str]:
        return {one: event["key"] for one, event in self.steps.items() if not names or one[1] in names}


class Runner:
    """Run configs in this process and count the starts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._starts = Counter[str]()
        for name, module, attribute in (
            ("engine", tasks.jobs.entry, "start_engine"),
            ("trainer", tasks.training.scripted, "train"),
        ):
            monkeypatch.setattr(module, attribute, self._counted(name, getattr(module, attribute)))

    def _counted(self, name: str, started: Any) -> Any:
        def start(*given: Any) -> Any:
            self._starts[name] += 1
            return started(*given)

        return start

    def run(self, described: RunConfig) -> Done:
        self._starts.clear()
        steps: dict[tuple[int, str, str], dict[str, Any]] = {}

        def heard(event: Any) -> None:
            if event["event"] == "step":
                place = event["iteration"], event["step"], event["label"]
                assert place not in steps, "a step was told twice"
                steps[place] = dict(event)

        store, run = small.start(described, listen=heard)
        star(run)
        return Done(store, run, steps, self._starts["engine"], self._starts["trainer"])

    def config(self, **changes: Any) -> RunConfig:
        return small.config(self.folder, **{**ONE_ITERATION, **changes})


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a store that holds a whole small run."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        done = Runner(folder, patch).run(small.config(folder, **ONE_ITERATION))
    assert (done.engines, done.trainers) == (2, 2)
    return folder


@pytest.fixture
def runner(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Give a copy of that store, and a runner on it."""
    shutil.copytree(first, tmp_path / "copy")
    return Runner(tmp_path / "copy", monkeypatch)


def test_a_second_run_reuses_every_step_and_starts_nothing(runner: Runner) -> None:
    done = runner.run(runner.config())
    assert len(done.steps) > 20
    assert done.computed() == set()
    assert (done.engines, done.trainers) == (0, 0)
    logged = [one for one in done.store.run_log(done.run.run_id).records() if one["kind"] == "step"]
    assert len(logged) == len(done.steps)
    assert all(one["reused"] for one in logged)
    assert len(done.store.runs()) == 2


class WarmEngine(ScriptedEngine):
    """Answer otherwise at another temperature, as real engines do."""

    def add(self, request: Request) -> None:
        if request.sampling and request.sampling.temperature != 1:
            request = replace(request, model=f"{request.model} at {request.sampling.temperature}")
        super().add(request)


def test_another_temperature_samples_again_and_what_follows(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 3: a changed temperature never goes on with the old completions."""
    monkeypatch.setattr("tasks.engines.scripted.ScriptedEngine", WarmEngine)
    done = runner.run(runner.config(sample={"temperature": 0.7}))
    assert {one for one in done.computed() if one[0] == 0} == set()
    assert done.computed() == {
        (1, one) for one in ("sample", "select", "pairs", "train", "parity", "evaluate", "score", "gate")
    }
    assert (done.engines, done.trainers) == (2, 1)


def test_another_selection_does_not_sample_again(runner: Runner) -> None:
    done = runner.run(runner.config(select={"keep_per_pair": 3}))
    assert (1, "select") in done.computed()
    assert (1, "train") in done.computed()
    assert (1, "sample") not in done.computed()
    assert {one for one in done.computed() if one[0] == 0} == set()
    assert (done.engines, done.trainers) == (1, 1)


def test_a_selection_with_the_same_outcome_trains_no_more(runner: Runner) -> None:
    """What follows is named by what was selected, not by how."""
    done = runner.run(runner.config(select={"keep_per_pair": 1, "min_right": 0.01}))
    assert done.computed() == {(1, "select")}
    assert (done.engines, done.trainers) == (0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"work": "elsewhere"},
        {"name": "renamed"},
        {"sample": {"shard_pairs": 3}, "evaluate": {"base": False, "shard_pairs": 2}},
        {"train": {"per_device_batch": 1, "save_every": 7, "resume": "off"}},
        {"engine": {"max_num_seqs": 2, "gpu_memory": 0.5, "enforce_eager": True, "in_process": True}},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_what_is_not_in_the_keys_reuses_all(runner: Runner, changes: dict[str, Any]) -> None:
    if "work" in changes:
        changes = {"work": str(runner.folder / changes["work"])}
    done = runner.run(runner.config(**changes))
    assert done.computed() == set()
    assert (done.engines, done.trainers) == (0, 0)


def test_the_same_base_at_another_path_is_the_same(runner: Runner) -> None:
    described = runner.config()
    shutil.copytree(runner.folder / "base", runner.folder / "moved")
    model = described.model.model_copy(update={"base": str(runner.folder / "moved")})
    assert runner.run(described.model_copy(update={"model": model})).computed() == set()


def test_retrained_weights_at_the_same_path_are_not_the_old(runner: Runner) -> None:
    """Trap 2: a cache by model name or path would reuse the rationales of the old weights."""
    described = runner.config()
    assert runner.run(described).computed() == set()
    weights = runner.folder / "base" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    done = runner.run(described)
    assert done.computed() == {(one[0], one[1]) for one in done.steps} - {(0, "bootstrap")}
    assert all(not event["reused"] for place, event in done.steps.items() if place[1] != "bootstrap")
    assert (done.engines, done.trainers) == (2, 2)


def test_another_tokenizer_or_template_is_another_model(runner: Runner) -> None:
    described = runner.config()
    (runner.folder / "base" / "chat_template.jinja").write_text("{{ messages }}")
    done = runner.run(described)
    assert {(0, "base"), (0, "split"), (0, "train"), (1, "sample")} <= done.computed()


def test_another_seed_shares_nothing_but_the_base(runner: Runner) -> None:
    done = runner.run(runner.config(seed=1))
    assert {place for place, event in done.steps.items() if event["reused"]} == {(0, "base", "")}


def test_shuffled_gold_is_judged_anew_but_not_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tmp_path, monkeypatch)
    plain = runner.run(runner.config(bootstrap=None))
    shuffled = runner.run(runner.config(bootstrap=None, data={"shuffle_gold": True}))
    assert shuffled.keys("sample", "evaluate", "base").items() >= plain.keys("sample", "base").items()
    assert (1, "sample") not in shuffled.computed()
    assert {(0, "split"), (1, "select"), (1, "pairs"), (1, "train")} <= shuffled.computed()
    assert {one for one in shuffled.computed() if one[0] == 0} == {(0, "split"), (0, "score")}


def test_shuffled_gold_leaves_the_warm_start_as_it_is(runner: Runner) -> None:
    """Else the control would differ from the run in its warm start too."""
    done = runner.run(runner.config(data={"shuffle_gold": True}))
    assert {(0, "split"), (0, "bootstrap"), (1, "select")} <= done.computed()
    assert not {(0, "train"), (0, "parity"), (0, "evaluate"), (1, "sample")} & done.computed()


def test_a_voided_step_is_computed_as_the_next_attempt(runner: Runner) -> None:
    before = runner.run(runner.config())
    key = before.keys("sample")[1, "sample", ""]
    old = before.store.manifest(key)
    assert old is not None
    assert before.store.void(key, "lost", "a test") == 0
    done = runner.run(runner.config())
    new = done.store.manifest(key)
    assert new is not None
    assert (new.attempt, new.nonce != old.nonce) == (1, True)
    assert new.artifact("completions").digest == old.artifact("completions").digest
    assert done.computed() == {(1, "sample")}  # the rows are the same, so what follows is
    assert done.steps[1, "sample", ""]["attempt"] == 1
    assert (done.engines, done.trainers) == (1, 0)
    assert runner.run(runner.config()).computed() == set()


def test_a_plan_writes_nothing_where_a_kill_left_scores_to_do(runner: Runner) -> None:
    """The next thing to do may be a CPU step inside a session: a plan computes that no more than the others."""
    described = runner.config()
    done = runner.run(described)
    for name in ("score", "gate"):
        for key in done.keys(name).values():
            done.store.backend.delete(f"steps/{key}/0/manifest.json")
    before = list(done.store.backend.list(""))
    planned = make_plan(done.store, described, star)
    assert list(done.store.backend.list("")) == before
    to_do = [(one.iteration, one.step) for one in planned if one.state == "to do"]
    assert to_do[0] == (0, "score")


def test_more_votes_add_blocks(runner: Runner) -> None:
    eight = runner.run(runner.config(evaluate={"votes": 8, "base": False}))
    sixteen = runner.run(runner.config(evaluate={"votes": 16, "base": False}))
    old, new = eight.keys("evaluate"), sixteen.keys("evaluate")
    assert new.items() > old.items()
    added = {place: sixteen.steps[place] for place in new.keys() - old.keys()}
    assert {place[2].rpartition(" ")[2] for place in added} == {"9–16"}
    assert len(added) == 2 * 2 * 2  # checkpoints, suites, orders
    assert {place[1] for place, event in sixteen.steps.items() if not event["reused"]} == {"evaluate", "score"}
    assert sixteen.trainers == 0
    for (_, name, label), event in sixteen.steps.items():
        manifest = sixteen.store.manifest(event["key"])
        if name == "score" and label == "test":
            assert manifest is not None
            judgments = sixteen.store.read(manifest.artifact("judgments"))
            assert Counter(judgments["sample"].to_pylist()).keys() == set(range(16))


# Every field of the config: in a key, or annotated why not.


class FakeStore:
    """Say of every step that it is committed, with rows named by its key: the loop walks and computes nothing."""

    url = "nowhere"

    def __init__(self, cache: Path) -> None:
        self.cache = SimpleNamespace(root=cache)

    def read(self, artifact: Artifact, columns: list[str] | None = None) -> pa.Table:
        return empty(artifact.name).select(columns or SCHEMAS[artifact.name].names)

    def manifest(self, key: str) -> Manifest:
        artifacts = {name: Artifact(name, 1, digest_json([key, name]), 1, ()) for name in SCHEMAS}
        sets = {name: digest_json([key, name]) for name in ("dev", "test", "made", "ood", *PARTS)}
        facts = {
            "model": {"base": digest_json([key, "base"]), "adapter": digest_json([key, "adapter"])},
            "decision": "go",
            "certificate": {"pairs": dict.fromkeys(sets, 1), "digests": sets},
        }
        return Manifest(key, 0, "", 1, {}, {}, artifacts, {}, facts, "", "")


FieldPath = tuple[str | int, ...]
PARTS = tuple(f"part-{number}" for number in range(1, 9))


def step_keys(described: RunConfig, cache: Path) -> set[str]:
    """Give the keys of all steps of a run, from its config and input files alone."""
    keys: set[str] = set()
    store: Any = FakeStore(cache)
    star(DryRun(Context(store, described, cache), lambda event: keys.add(event["key"])))
    return keys


def fields(section: type[Section], path: FieldPath = ()) -> Iterator[tuple[tuple[str | int, ...], FieldInfo]]:
    """Give every plain field of a config; of a list of sections, those of its first."""
    for name, field in section.model_fields.items():
        inner = [one for one in flat(field.annotation) if isinstance(one, type) and issubclass(one, Section)]
        many = any(get_origin(one) is tuple for one in (field.annotation, *get_args(field.annotation)))
        if inner:
            yield from fields(inner[0], (*path, name, 0) if many else (*path, name))
            if many or (type(None) in flat(field.annotation) and name != "generator"):  # a source has one or a path
                yield (*path, name), field  # the section itself may be left out
        else:
            yield (*path, name), field


def flat(annotation: Any) -> list[Any]:
    """Take a type apart into what it is made of."""
    return [annotation] if not get_args(annotation) else [part for one in get_args(annotation) for part in flat(one)]


def others(field: FieldInfo, value: Any) -> Iterator[Any]:
    """Suggest other values of a field, the likely ones first."""
    for annotation in (field.annotation, *get_args(field.annotation)):
        if get_origin(annotation) is Literal:
            yield from get_args(annotation)
        if isinstance(annotation, type) and issubclass(annotation, Enum):
            yield from (one.value for one in annotation)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value * 2, value / 2, value + 0.125, value - 0.125)
    elif isinstance(value, str):
        yield from (f"{value}x", f"{value} x")
    elif isinstance(value, list):
        yield from ([*value, "more"], value[:-1], [*value, *value], ["quotes"])
    elif isinstance(value, dict):
        yield {**value, "more": 1}
    yield from (None, 1, 0.5, "given")


HUB_SOURCE = {"name": "far", "hub": "who/what", "revision": "1" * 40, "config": "default", "split": "train"}
BASES: dict[str, dict[str, Any]] = {
    "star-sft": {"iterations": 2, "pairs": {"data": "cumulative"}, "sample": {"stop": ["</s>"]}},
    "rationalized": {"iterations": 1, "bootstrap": None, "rationalize": {"failures": True}},
    "star-rationalizer": {"iterations": 1, "method": "star-rationalizer"},
    "star-dpo": {"iterations": 2, "method": "star-dpo", "bootstrap": None, "train": {"init_from": "previous"}},
    "hub": {
        "iterations": 1,
        "bootstrap": None,
        "data": {"sources": [HUB_SOURCE], "suites": [HUB_SOURCE | {"name": "farther", "split": "test"}]},
    },
}


def values_of(base: str, folder: Path) -> dict[str, Any]:
    """Give a full config as plain values: sources and rationales in files, a few-shot example, a suite."""
    rows = folder / "pairs.jsonl"
    row = {"prompt": "Hi", "response_a": "x", "response_b": "y", "label": "A", "rationale": "x it is [[A]]"}
    rows.write_text(json.dumps(row) + "\n")
    shot = {"prompt": "Hi", "response_a": "x", "response_b": "y", "rationale": "x.", "verdict": "A"}
    described = small.config(folder, **BASES[base], prompt={"few_shot": [shot]}, split={"salt": "a"})
    described = described.model_copy(update={"hardware": HardwareConfig(gpus=1, gpu_memory_gib=80)})
    return described.model_dump(mode="json")


def at(values: Any, path: FieldPath) -> Any:
    """Find a value; a section that is left out has none."""
    for one in path:
        if values is None or (isinstance(one, int) and not values):
            return KeyError
        values = values[one]
    return values


def changed(values: dict[str, Any], path: FieldPath, value: Any) -> RunConfig | None:
    """Change one field; None where the config can't be like that."""
    copy = json.loads(json.dumps(values))
    at(copy, path[:-1])[path[-1]] = value
    try:
        described = RunConfig.model_validate(copy)
    except pydantic.ValidationError:
        return None
    return described if described != RunConfig.model_validate(values) else None


def in_keys(path: FieldPath, field: FieldInfo, folder: Path) -> bool | None:
    """Say whether another value of a field gives other step keys in any run; None where no other value was found."""
    found: bool | None = None
    for base in BASES:
        values = values_of(base, folder)
        if at(values, path) is KeyError or at(values, path[:-1]) is None:
            continue
        before = step_keys(RunConfig.model_validate(values), folder / "cache")
        for value in others(field, at(values, path)):
            described = changed(values, path, value)
            if described is None or (path[:2] == ("model", "base")):
                continue
            try:
                keys = step_keys(described, folder / "cache")
            except (OSError, ValueError):  # it names a file that isn't there
                continue
            found = bool(found) or keys != before
            if found:
                return True
    return found


ALL_FIELDS = {".".join(str(one) for one in path): (path, field) for path, field in fields(RunConfig)}
BY_CONTENT = {  # fields that name a file or folder: their content is in the keys, shown by tests above and below
    "model.base",
    "model.revision",
    "data.sources.0.path",
    "data.suites.0.path",
    "bootstrap.rationales",
}


def test_the_walk_finds_the_fields() -> None:
    assert len(ALL_FIELDS) > 70
    assert {"seed", "model.max_len", "data.sources.0.generator.seed", "prompt.few_shot.0.verdict"} <= set(ALL_FIELDS)
    assert {"train.lora", "train.lora.r", "bootstrap", "bootstrap.epochs", "data.suites"} <= set(ALL_FIELDS)
    assert set(ALL_FIELDS) >= BY_CONTENT
    assert annotated_types.Gt in {type(mark) for mark in ALL_FIELDS["model.max_len"][1].metadata}


@pytest.mark.parametrize("name", [name for name in ALL_FIELDS if name not in BY_CONTENT])
def test_a_field_is_in_a_step_key_or_says_why_not(name: str, tmp_path: Path) -> None:
    """A field that changes no key and has no `NotInKey(reason)` would let old results pass for new ones."""
    path, field = ALL_FIELDS[name]
    reasons = [mark.reason for mark in field.metadata if isinstance(mark, NotInKey)]
    changes = in_keys(path, field, tmp_path)
    assert changes is not None, f"no other valid value of {name} was found: teach others() one"
    assert changes == (not reasons), f"{name}: in a step key: {changes}; NotInKey: {reasons}"


def test_files_are_named_by_their_content(tmp_path: Path) -> None:
    values = values_of("star-sft", tmp_path)
    rows = tmp_path / "pairs.jsonl"
    values["data"]["sources"][0] |= {"path": str(rows), "generator": None}
    values["data"]["suites"][0] |= {"path": str(rows), "generator": None}
    values["bootstrap"]["rationales"] = str(rows)
    shutil.copy(rows, tmp_path / "copy.jsonl")
    (tmp_path / "other.jsonl").write_text(rows.read_text().replace("Hi", "Ho"))
    before = step_keys(RunConfig.model_validate(values), tmp_path / "cache")
    for path in (("data", "sources", 0, "path"), ("data", "suites", 0, "path"), ("bootstrap", "rationales")):
        same = changed(values, path, str(tmp_path / "copy.jsonl"))
        other = changed(values, path, str(tmp_path / "other.jsonl"))
        assert same is not None
        assert other is not None
        assert step_keys(same, tmp_path / "cache") == before
        assert step_keys(other, tmp_path / "cache") != before


def test_a_hub_model_is_named_by_id_and_commit(tmp_path: Path) -> None:
    values = values_of("star-sft", tmp_path)
    values["model"] |= {"base": "who/what", "revision": "1" * 40}
    before = step_keys(RunConfig.model_validate(values), tmp_path / "cache")
    for name, value in (("base", "who/else"), ("revision", "2" * 40)):
        other = changed(values, ("model", name), value)
        assert other is not None
        assert step_keys(other, tmp_path / "cache") != before
