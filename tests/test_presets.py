"""Presets of the paper and our own: each loads, says what it needs, fits the GPUs it names, and plans."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import small

from configs.budget import fit
from configs.facts import HUB, missing_token
from configs.load import PRESETS, ConfigError, check, load_config, presets
from configs.run import RunConfig
from flows.iteration import star
from storage.store import open_store
from tasks.outcome import cost_plan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COMMIT = "a" * 40
COMMITS = [f"data.{one}.0.revision={COMMIT}" for one in ("sources", "suites")]
PAPER = [name for name in presets() if name.startswith("paper-")]
RATES = {"paper-ultrafeedback-rationalizer": 2e-5}
METHODS = {"sft": "star-sft", "dpo": "star-dpo", "rationalizer": "star-rationalizer", "genrm": "genrm"}


@pytest.fixture(autouse=True)
def _no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no cache and no token of this machine count."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def load(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    filled = COMMITS if name in PAPER else [f"data.sources.0.path={__file__}"]
    return load_config(name, [*filled, *overrides])


def test_they_are_all_there() -> None:
    assert set(PAPER) == {
        *(f"paper-ultrafeedback-{one}" for one in ("star-sft", "star-dpo", "rationalizer", "genrm")),
        *(f"paper-ultrainteract-{one}" for one in ("star-sft", "star-dpo")),
    }
    assert "improved" in presets()


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_values(name: str) -> None:
    config = load(name)
    assert config.method == METHODS[name.rpartition("-")[2]]
    assert config.train.learning_rate == RATES.get(name, 1e-6)
    assert config.train.epochs == (1 if "ultrainteract" in name else 3)
    assert (config.iterations, config.train.lora, config.train.beta) == (3, None, 1.0)
    assert (config.sample.temperature, config.sample.top_p, config.evaluate.votes) == (1.0, 0.95, 32)
    assert [one.hub for one in config.data.suites] == ["allenai/reward-bench"]
    assert check(config) == []


@pytest.mark.parametrize("name", PAPER)
def test_a_commit_that_is_not_known_is_asked_for_and_not_made_up(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(name)
    assert [problem.partition(" ")[0] for problem in refused.value.problems] == [
        "data.sources.0.revision",
        "data.suites.0.revision",
    ]
    assert all("40 hex digits" in problem for problem in refused.value.problems)


@pytest.mark.parametrize("name", [*PAPER, "improved"])
def test_the_header_names_what_it_needs_and_each_value_its_source(name: str) -> None:
    text = (PRESETS / f"{name}.yaml").read_text()
    assert "GPU of 140 GiB" in text.partition("\nname:")[0]
    values = [line for line in text.splitlines() if re.match(r"  +(- )?[a-z_]+: ", line)]
    values = [line for line in values if "!required" not in line and not line.endswith("|-")]
    assert len(values) >= 7
    assert [line for line in values if "  # " not in line] == []


@pytest.mark.parametrize("name", [*PAPER, "improved", "star-sft", "star-dpo"])
def test_it_fits_the_gpus_it_names_and_no_smaller_ones(name: str) -> None:
    config = load(name)
    assert config.hardware is not None
    assert dict(fit(config))["trainer in all"] <= config.hardware.gpu_memory_gib
    with pytest.raises(ConfigError, match=r"train: it needs about .* there is a GPU of 80\.0 GiB") as refused:
        fit(load(name, ["hardware.gpu_memory_gib=80"]))
    assert len(refused.value.problems) == 1
    adapter = ["train.lora.r=64", "train.lora.alpha=128", "train.learning_rate=1e-4", "hardware.gpu_memory_gib=80"]
    assert fit(load(name, adapter))


def test_more_gpus_than_are_named_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: 4 GPUs"):
        fit(load("improved", ["engine.tensor_parallel=4"]))


def test_a_gated_base_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("improved").model
    said = missing_token(model)
    assert said is not None
    assert "is gated and no token is set" in said
    assert missing_token(model.model_copy(update={"base": "Qwen/Qwen2.5-7B-Instruct"})) is None
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", "x")
        assert missing_token(model) is None
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("x")
    assert missing_token(model) is None
    (tmp_path / "hf" / "token").unlink()
    snapshot = tmp_path / "hf/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots" / str(model.revision)
    snapshot.mkdir(parents=True)
    assert missing_token(model) is None, "what is there needs no token"


def test_the_shapes_that_are_known_give_the_published_sizes() -> None:
    from configs.facts import find_facts

    billions = {"meta-llama/Llama-3.1-8B-Instruct": 8.03, "meta-llama/Llama-3.1-70B-Instruct": 70.55}
    billions["Qwen/Qwen2.5-7B-Instruct"] = 7.61
    model = load("improved").model
    for name in HUB:
        facts = find_facts(model.model_copy(update={"base": name}))
        assert facts is not None
        assert facts.parameters / 1e9 == pytest.approx(billions[name], abs=0.02), name


def rows(name: str) -> list[dict[str, Any]]:
    """Give rows with the columns of the preset's own data."""
    made = []
    for number in range(40):
        asked, better, worse = f"Question {number}?", f"Right {number}.", f"Wrong {number}."
        if "ultrainteract" in name:
            trajectory = [{"from": "user", "value": asked}]
            tree = {"parent_id": str(number // 2), "id": str(number)}
            made.append({**tree, "trajectory": trajectory, "chosen": better, "rejected": worse})
        else:
            sides = {"chosen": better, "rejected": worse}
            talk = {
                side: [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
                for side, text in sides.items()
            }
            made.append({"prompt": asked, **talk})
    return made


@pytest.mark.parametrize("name", [*PAPER, "improved"])
def test_it_is_planned_with_files_of_the_same_columns(name: str, tmp_path: Path) -> None:
    source, suite = tmp_path / "pairs.jsonl", tmp_path / "suite.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(name)))
    bench = [{"prompt": f"Ask {i}", "chosen": "yes", "rejected": "no", "subset": "donotanswer"} for i in range(6)]
    suite.write_text("".join(json.dumps(row) + "\n" for row in bench))
    values = load(name).model_dump(mode="json")
    values["data"]["sources"] = [{"name": "own", "path": str(source)}]
    values["data"]["suites"] = [{"name": "reward-bench", "path": str(suite)}]
    values["model"] |= {"base": str(small.base_folder(tmp_path / "base")), "revision": None}
    values["engine"]["kind"] = values["train"]["kind"] = "scripted"
    values |= {"store": str(tmp_path / "store"), "work": str(tmp_path / "work"), "hardware": None}
    described = RunConfig.model_validate(values)
    planned, forecast = cost_plan(open_store(described.store), described, star)
    assert {one.state for one in planned} == {"to do"}
    assert forecast.engine_starts() == 4
    assert forecast.unknown() == []
    assert "reward-bench" in forecast.suites()
    assert forecast.suites()["reward-bench"]["rows"].value > 0


@pytest.mark.parametrize("name", PAPER)
def test_it_is_planned_as_it_is_without_a_network(name: str, tmp_path: Path) -> None:
    described = load(name, [f"store={tmp_path / 'store'}", f"work={tmp_path / 'work'}"])
    _, forecast = cost_plan(open_store(described.store), described, star)
    assert forecast.unknown() == []
    hours = forecast.totals()["gpu_hours"]
    assert 0 < hours.low < hours.value < hours.high
