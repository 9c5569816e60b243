"""Contradictions between values: each names its key, and what is in order is not refused."""

from __future__ import annotations

import pytest
import yaml
from config_files import MINIMAL, only, refused, written

from configs.check import conflicts
from configs.load import check, load_config
from configs.run import RunConfig

LORA = "train.lora={r: 8}"


@pytest.mark.parametrize(
    ("overrides", "key", "word"),
    [
        (["sample.max_tokens=2048"], "sample.max_tokens", "no room for the prompt"),
        (["evaluate.temperature=0", "evaluate.dev_votes=1"], "evaluate.votes", "one vote"),
        (["evaluate.temperature=0", "evaluate.votes=1"], "evaluate.dev_votes", "one vote"),
        (["sample.n=2", "sample.temperature=0"], "sample.temperature", "same text"),
        (["method=star-dpo"], "sample.n", "2 or more"),
        (["method=star-dpo", "sample.n=2", "select.keep_per_pair=2"], "select.keep_per_pair", "pairs.max_per_pair"),
        (["method=star-dpo", "sample.n=2", "select.min_right=1"], "select.min_right", "star-dpo"),
        (["method=genrm", "select.keep_per_pair=2"], "select.keep_per_pair", "every pair"),
        (["method=genrm", "select.min_right=0.5"], "select.min_right", "every pair"),
        (["method=genrm", "select.max_right=0.5"], "select.max_right", "every pair"),
        (["method=genrm", "select.balance=true"], "select.balance", "every pair"),
        (["method=genrm", "gate.min_parse_rate=0.5"], "gate.min_parse_rate", "no verdict to parse"),
        (["method=genrm", "train.reference=previous"], "train.reference", "genrm"),
        (["method=star-rationalizer", "select.min_right=0.5"], "select.min_right", "set 0"),
        (["method=star-rationalizer", "select.max_right=0.5"], "select.max_right", "set 1"),
        (["method=star-rationalizer", "rationalize.failures=true"], "rationalize.failures", "every pair"),
        (["method=genrm", "rationalize.failures=true"], "rationalize.failures", "samples nothing"),
        (["method=star-dpo", "sample.n=2", "rationalize.failures=true"], "rationalize.failures", "off-policy"),
        (["rationalize={failures: true, off_policy_chosen: true}"], "rationalize.off_policy_chosen", "star-dpo"),
        (
            ["method=star-dpo", "sample.n=2", "rationalize.off_policy_chosen=true"],
            "rationalize.off_policy_chosen",
            "set",
        ),
        (["rationalize.failures=true", "select.min_right=0.1"], "select.min_right", "every pair that failed"),
        (["rationalize.n=2"], "rationalize.n", "rationalize.failures"),
        (["rationalize.max_share=0.3"], "rationalize.max_share", "rationalize.failures"),
        (["rationalize.max_share=1"], "rationalize.max_share", "below 1"),
        (["rationalize.hint='Say why.'"], "rationalize.hint", "lacks {verdict}"),
        (["rationalize.hint='{verdict}, since {gold}'"], "rationalize.hint", "unknown placeholder {gold}"),
        (["rationalize.hint='[[{verdict}]]'"], "rationalize.hint", "6 words in a row"),
        (["method=genrm", "sample.max_tokens=1", "sample.n=1"], "sample.max_tokens", "8 or more"),
        (
            ["rationalize.failures=true", "rationalize.n=2", "sample.temperature=0", "sample.n=1"],
            "sample.temperature",
            "same text 2 times",
        ),
        (["train.per_device_batch=3"], "train.per_device_batch", "divisor"),
        ([LORA], "train.learning_rate", "LoRA"),
        ([LORA, "train.learning_rate=9e-6"], "train.learning_rate", "9e-06"),
        (
            [
                LORA,
                "train.learning_rate=1e-4",
                "bootstrap={rationales: generator, learning_rate: 1e-6}",
                "split.bootstrap=9",
            ],
            "bootstrap.learning_rate",
            "LoRA",
        ),
        ([LORA, "train.learning_rate=1e-4", "train.lora.r=1024"], "train.lora.r", "512"),
        (["train.reference=previous"], "train.reference", "star-sft"),
        (["model.base=owner/name"], "model.revision", "commit"),
        (["model.base=owner/name", "model.revision=main"], "model.revision", "branch"),
        (["model.base=gpt2"], "model.base", "no folder"),
        (["model.base=/no/such/folder"], "model.base", "no folder"),
        (["prompt.user='{prompt} {response_a} [[A]] [[B]]'"], "prompt.user", "lacks {response_b};"),
        (["prompt.user='{prompt} {prompt} {response_a} {response_b} [[A]] [[B]]'"], "prompt.user", "{prompt} 2 times"),
        (
            ["prompt.user='{prompt} {response_a} {response_b} {gold} [[A]] [[B]]'"],
            "prompt.user",
            "unknown placeholder {gold}",
        ),
        (["prompt.user='{prompt} {response_a} {response_b}'"], "prompt.user", "end with [[A]] or [[B]]"),
        (["prompt.system='About {prompt}'"], "prompt.system", "prompt.user alone"),
        (
            ["prompt.few_shot=[{prompt: p, response_a: a, response_b: b, rationale: 'so [[A]]', verdict: A}]"],
            "prompt.few_shot.0.rationale",
            "take it out",
        ),
        (
            ["prompt.few_shot=[{prompt: p, response_a: a, response_b: ' ', rationale: r, verdict: A}]"],
            "prompt.few_shot.0.response_b",
            "empty",
        ),
        (["split.bootstrap=10"], "split.bootstrap", "no warm start"),
        (["bootstrap={rationales: generator}"], "split.bootstrap", "pairs of its own"),
        (["bootstrap={rationales: /no/file.jsonl}", "split.bootstrap=9"], "bootstrap.rationales", "/no/file.jsonl"),
        (
            ["data.sources.0={name: a, path: setup.cfg}", "bootstrap={rationales: generator}", "split.bootstrap=9"],
            "bootstrap.rationales",
            "needs a source",
        ),
        (["split.dev=0.5", "split.test=0.5"], "split.dev", "below 1"),
        (["split.dev=0"], "split.dev", "gate"),
        (["select.min_right=0.9", "select.max_right=0.1"], "select.min_right", "swap"),
        (["select.max_right=0"], "select.max_right", "raise it"),
        (["data.sources.1={name: synthetic, path: setup.cfg}"], "data.sources.0.name", "more than one"),
        (["data.suites.0={name: synthetic, path: setup.cfg}"], "data.sources.0.name", "more than one"),
        (
            ["data.sources.0={name: a, path: setup.cfg}", "data.suites.0={name: b, path: setup.cfg}"],
            "data.suites.0",
            "same pairs",
        ),
        (["data.sources.0={name: a, path: /no/file.parquet}"], "data.sources.0.path", "/no/file.parquet"),
        (["data.sources.0={name: a, path: .}"], "data.sources.0.path", "folder"),
        (["data.sources.0={name: a, path: 's3://bucket'}"], "data.sources.0.path", "no object"),
        (["data.sources.0={name: a, path: 'gs://bucket/a'}"], "data.sources.0.path", "s3://"),
        (["data.sources.0={name: a, hub: who/what}"], "data.sources.0.revision", "no commit is set"),
        (["data.sources.0={name: a, hub: who/what, revision: main}"], "data.sources.0.revision", "`main` is no commit"),
        (["data.sources.0={name: a, hub: what, revision: " + "c" * 40 + "}"], "data.sources.0.hub", "owner/name"),
        (["data.sources.0={name: a, path: setup.cfg, split: train}"], "data.sources.0.split", "source of the hub"),
        (
            [
                "data.sources.0={name: a, hub: who/what, revision: " + "c" * 40 + "}",
                "data.suites.0={name: b, hub: who/what, revision: " + "d" * 40 + "}",
            ],
            "data.suites.0",
            "same pairs",
        ),
        (["store=https://bucket/x"], "store", "s3://bucket/prefix"),
        (["store='s3://key:secret@bucket/x'"], "store", "s3://bucket/prefix"),
        (["store=' '"], "store", "empty"),
        (["sample.stop.0='['"], "sample.stop.0", "verdict"),
        (["sample.stop.0=''"], "sample.stop.0", "empty"),
        (["engine.extra.max_model_len=9"], "engine.extra.max_model_len", "model.max_len"),
        (["engine.kind=transformers", "engine.kv_cache_dtype=fp8"], "engine.kv_cache_dtype", "has no such thing"),
        (["train.processes=3"], "train.batch_size", "multiple of train.per_device_batch 8 x train.processes 3 = 24"),
        (["train.processes=2", "train.resume=store"], "train.resume", "set local or off"),
    ],
)
def test_contradictions_name_the_key(tmp_path, monkeypatch, overrides, key, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.cfg").write_text("")
    problems = refused(written(tmp_path, MINIMAL), overrides)
    only(problems, word)
    assert problems[0].startswith(f"{key} ("), problems[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["sample.stop.0=']]'"],
        ["store=s3://bucket"],
        ["store=s3://my.bucket-1/a/b"],
        ["store=/abs/path"],
        ["evaluate={temperature: 0, votes: 1, dev_votes: 1}"],
        ["method=star-dpo", "sample.n=2", "train.reference=previous"],
        ["method=star-dpo", "sample.n=2", "select.keep_per_pair=null"],
        ["split.dev=0", "gate.on_worse=continue"],
        ["method=star-rationalizer", "select.balance=true", "select.keep_per_pair=2"],
        ["rationalize={failures: true, n: 2, max_share: 0.3}"],
        ["method=star-dpo", "sample.n=2", "rationalize={failures: true, off_policy_chosen: true}"],
        ["method=genrm", "prompt.user='{prompt} {response_a} {response_b}'"],
        ["data.sources.0={name: a, path: 's3://bucket/key.parquet'}"],
        ["data.sources.0={name: a, hub: who/what, revision: " + "c" * 40 + ", split: train, format: chosen}"],
        ["data.sources.0={name: a, path: 's3://bucket/x', file: csv, columns: {prompt: question}}"],
        ["prompt.user='{prompt} {response_a} {response_b}'", "engine.kind=scripted"],
        ["prompt.user='{prompt} {response_a} {response_b} as {\"verdict\": 1} [[A]] [[B]]'"],
        ["model.base=."],
        ["train.processes=4", "train.per_device_batch=4"],
        ["train.resume=store"],
        ["engine.kind=transformers", "engine.extra.attn_implementation=eager"],
    ],
)
def test_what_is_in_order_is_not_refused(tmp_path, overrides):
    assert check(load_config(written(tmp_path, MINIMAL), overrides)) == []


def test_check_finds_contradictions_in_a_config_made_in_python():
    config = RunConfig.model_validate({**yaml.safe_load(MINIMAL), "method": "star-dpo", "sample": {"max_tokens": 4096}})
    assert [problem.split(":")[0] for problem in check(config)] == ["sample.max_tokens", "sample.n"]
    assert all(key for conflict in conflicts(config) for key in conflict.keys)
