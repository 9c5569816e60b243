"""Real vLLM on the CPU: the engine by itself, and a run that trains with TRL, is served, sampled and evaluated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from configs.run import InterpretersConfig
from flows.iteration import star
from storage.errors import TransientError
from storage.store import open_store
from tasks.history import read_history
from tasks.jobs.launch import ProcessLauncher
from tasks.run import Run, create_run, open_run
from tests import taught
from tests.environments import environment
from tests.outer import command_line
from tests.tiny_model import tiny_model

if TYPE_CHECKING:
    from configs.run import RunConfig

pytestmark = pytest.mark.slow

ENGINE: dict[str, Any] = {
    "kind": "vllm",
    "dtype": "float32",
    "adapter": "merge",
    "enforce_eager": True,
    "max_num_seqs": 16,
    "cpu_kv_cache_gib": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


ASK = """
import json, sys
from pathlib import Path
from configs.run import EngineConfig
from tasks.engines.base import Request, Sampling, Served
from tasks.engines.template import ChatTemplate
from tasks.engines.vllm import VllmEngine

if __name__ == "__main__":
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    template = ChatTemplate(folder, {})
    engine = VllmEngine(Served(folder, "base"), EngineConfig(**settings), template, max_len=128, seed=1)
    ids = template.prompts([[{"role": "user", "content": "Which one is better?"}]])[0]
    prefix = [*ids, *template.encode("A [[")]
    first = tuple(json.loads(sys.argv[3]))  # the token that is drawn first, and another
    asked = [
        Request("drawn", ids, "base", sampling=Sampling(3, 1.0, 0.95, 8)),
        Request("own", ids, "base", sampling=Sampling(1, 0.0, 1.0, 4), letters=first),
        Request("letters", prefix, "base", letters=template.letters()),
        Request("scored", prefix, "base", scored=3),
        Request("long", ids * 20, "base", sampling=Sampling(2, 1.0, 0.95, 8)),
    ]
    for request in asked:
        engine.add(request)
    found = {}
    while len(found) < len(asked):
        for response in engine.poll():
            found[response.tag] = {
                "texts": [[text.finish_reason, text.n_tokens, text.logprob] for text in response.texts],
                "letters": response.letter_logprobs,
                "own": [dict(text.letters) for text in response.texts],
                "logprobs": response.logprobs,
                "error": response.error,
            }
    engine.close()
    print("FOUND " + json.dumps(found))
"""


def expected(model: Path) -> dict[str, Any]:
    """Compute what the engine must say of letters and scored tokens, with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from tasks.engines.template import ChatTemplate

    template = ChatTemplate(model, {})
    ids = template.prompts([[{"role": "user", "content": "Which one is better?"}]])[0]
    prefix = [*ids, *template.encode("A [[")]
    drawn = len(ids) - 1
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = network(torch.tensor([prefix])).logits[0].log_softmax(-1)
    scored = [float(logprobs[place - 1, prefix[place]]) for place in range(len(prefix) - 3, len(prefix))]
    first = [int(token) for token in logprobs[drawn].topk(2).indices]
    return {
        "letters": [float(logprobs[-1, token]) for token in template.letters()],
        "scored": scored,
        "first": first,
        "own": [float(logprobs[drawn, token]) for token in first],
    }


def test_engine_draws_reads_letters_scores_and_returns_errors_as_rows(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    wanted = expected(model)
    done = subprocess.run(
        [sys.executable, str(script), str(model), json.dumps(ENGINE), json.dumps(wanted["first"])],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, done.stderr[-3000:]
    found = json.loads(line.removeprefix("FOUND "))
    assert len(found["drawn"]["texts"]) == 3
    for finish_reason, n_tokens, logprob in found["drawn"]["texts"]:
        assert finish_reason in {"stop", "length"}
        assert 1 <= n_tokens <= 8
        assert logprob < 0
    assert found["letters"]["letters"] == pytest.approx(wanted["letters"], abs=0.02)
    assert found["own"]["own"][0][""] == pytest.approx(wanted["own"], abs=0.02)
    assert found["own"]["texts"][0][2] < 0  # the log-prob of what was drawn stays beside the letters'
    assert found["scored"]["logprobs"] == pytest.approx(wanted["scored"], abs=0.02)
    assert "exceed 128" in found["long"]["error"]


def open_real(config: RunConfig, run_id: str = "", listen: Any = None) -> Run:
    store = open_store(config.store)
    run_id = run_id or create_run(store, config)
    return open_run(store, run_id, ProcessLauncher, kind=Run, listen=listen or (lambda event: None))


def kill_engine_child(event: Any, killed: list[int]) -> None:
    """SIGKILL the engine's process, not the job's, when the first generation step is under way."""
    if killed or event["event"] != "step" or event["step"] != "parity":
        return
    for process in psutil.Process().children(recursive=True):
        if "VLLM::" in command_line(process):
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)


def test_a_run_on_s3_survives_a_killed_vllm_child_and_starts_no_engine_too_many(
    model: Path, tmp_path: Path, bucket: str
) -> None:
    gpu = environment(tmp_path / "gpu", without=("prefect", "click", "starwheel"))
    elsewhere = {"store": f"s3://{bucket}/runs", "interpreters": InterpretersConfig(engine=gpu, trainer=gpu)}
    config = taught.described(tmp_path, model, ENGINE).model_copy(update=elsewhere)
    killed: list[int] = []
    run = open_real(config, listen=lambda event: kill_engine_child(event, killed))
    with pytest.raises(TransientError, match=r"engine|job"):
        star(run)
    assert killed, "no vLLM child was there to be killed"
    before = {used.key for used in read_history(open_store(config.store), run.run_id).used}
    assert not [one for one in psutil.Process().children(recursive=True) if "tasks.jobs" in command_line(one)]

    again = open_real(config, run.run_id)
    assert star(again).number == 1

    store = open_store(config.store)
    history = read_history(store, run.run_id)
    assert before <= {used.key for used in history.used}
    manifests = [store.manifest(used.key) for used in history.used]
    starts = {one.facts["engine"]["start"] for one in manifests if one is not None and "engine" in one.facts}
    assert len(starts) == 3, "one start of the killed session that committed parity, and n + 1 = 2 after it"
    parity = [one for one in manifests if one is not None and one.step == "parity"]
    assert len(parity) == 2
    assert all(one.facts["to_trained"] < 0.05 < one.facts["to_start"] for one in parity)
    assert threading.active_count() < 10
