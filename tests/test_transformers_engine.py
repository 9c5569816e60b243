"""The engine of plain transformers: against forward passes of the model, alone and in batches, and in a whole run."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from configs.check import check
from configs.run import EngineConfig
from flows.iteration import star
from storage.errors import MissingDependencyError, StepFailedError
from storage.store import open_store
from tasks.engines.base import Request, Response, Sampling, Served
from tasks.engines.template import ChatTemplate
from tasks.engines.transformers import TransformersEngine, behind
from tasks.history import read_history
from tasks.jobs.launch import InlineLauncher
from tasks.run import Run, create_run, open_run
from tests import small, taught
from tests.tiny_model import tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.slow

ENGINE: dict[str, Any] = {"kind": "transformers", "dtype": "float32", "adapter": "serve", "max_num_seqs": 16}
GREEDY = Sampling(1, 0.0, 1.0, 12)
QUESTIONS = ["Which is better?", "A or B, and why? " * 5, "Paris", "the capital of France is Paris or Lyon"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def network(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def template(model: Path) -> ChatTemplate:
    return ChatTemplate(model, {})


@pytest.fixture(scope="module")
def prompts(template: ChatTemplate) -> list[list[int]]:
    return template.prompts([[{"role": "user", "content": text}] for text in QUESTIONS])


def engine(model: Path, template: ChatTemplate, *, seed: int = 1, served: Served | None = None, **settings: Any) -> Any:
    config = EngineConfig(**{**ENGINE, **settings})
    return TransformersEngine(served or Served(model, "base"), config, template, max_len=256, seed=seed)


def ask(one: Any, requests: Sequence[Request]) -> dict[Any, Response]:
    """Ask all at once and poll until every answer is there."""
    for request in requests:
        one.add(request)
    found: dict[Any, Response] = {}
    while len(found) < len(requests):
        found |= {response.tag: response for response in one.poll()}
    assert one.poll() == []
    return found


def greedy(network: Any, ids: list[int], limit: int, stops: set[int]) -> tuple[list[int], list[float]]:
    """Write greedily by one whole forward pass a token."""
    written: list[int] = []
    logprobs: list[float] = []
    with torch.no_grad():
        while len(written) < limit and not (written and written[-1] in stops):
            after = network(torch.tensor([ids + written])).logits[0, -1].log_softmax(-1)
            written.append(int(after.argmax()))
            logprobs.append(float(after.max()))
    return written, logprobs


def test_greedy_text_and_log_probs_are_those_of_forward_passes(
    model: Path, template: ChatTemplate, prompts: list[list[int]], network: Any
) -> None:
    """All in one batch, padded on the left: as each alone."""
    first = int(network(torch.tensor([prompts[0]])).logits[0, -1].argmax())
    pair = (first, template.letters()[1])
    found = ask(
        engine(model, template),
        [Request(at, ids, "base", sampling=GREEDY, letters=pair) for at, ids in enumerate(prompts)],
    )
    stop = template.tokenizer.eos_token_id
    for at, ids in enumerate(prompts):
        written, logprobs = greedy(network, ids, 12, {stop})
        (text,) = found[at].texts
        assert text.text == template.tokenizer.decode(written, skip_special_tokens=True)
        assert text.n_tokens == len(written)
        assert text.finish_reason == ("stop" if written[-1] == stop else "length")
        assert text.logprob == pytest.approx(sum(logprobs), abs=1e-3)
    with torch.no_grad():
        after = network(torch.tensor([prompts[0]])).logits[0, -1].log_softmax(-1)
    assert found[0].texts[0].letters[""] == pytest.approx([float(after[token]) for token in pair], abs=1e-4)


def test_a_batch_writes_what_one_by_one_is_written(
    model: Path, template: ChatTemplate, prompts: list[list[int]]
) -> None:
    requests = [Request(at, ids, "base", sampling=GREEDY) for at, ids in enumerate(prompts)]
    together, alone = engine(model, template), engine(model, template, max_num_seqs=1)
    found = ask(together, requests)
    for request in requests:
        (text,), (other,) = found[request.tag].texts, ask(alone, [request])[request.tag].texts
        assert (text.text, text.n_tokens, text.finish_reason) == (other.text, other.n_tokens, other.finish_reason)
        assert text.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_letters_and_scores_are_those_of_a_forward_pass(
    model: Path, template: ChatTemplate, prompts: list[list[int]], network: Any
) -> None:
    letters = template.letters()
    opened = [[*ids, *template.encode("A [[")] for ids in prompts]
    asked = [Request(("letters", at), ids, "base", letters=letters) for at, ids in enumerate(opened)]
    asked += [Request(("scored", at), ids, "base", scored=at + 2) for at, ids in enumerate(opened)]
    found = ask(engine(model, template), asked)
    for at, ids in enumerate(opened):
        with torch.no_grad():
            logprobs = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = [float(logprobs[-1, token]) for token in letters]
        assert found["letters", at].letter_logprobs == pytest.approx(wanted, abs=1e-4)
        scored = [float(logprobs[place - 1, ids[place]]) for place in range(len(ids) - at - 2, len(ids))]
        assert found["scored", at].logprobs == pytest.approx(scored, abs=1e-4)


def test_draws_follow_seed_temperature_and_top_p(model: Path, template: ChatTemplate, prompts: list[list[int]]) -> None:
    def drawn(seed: int, **changes: Any) -> list[str]:
        request = Request(0, prompts[0], "base", sampling=replace(Sampling(20, 1.0, 1.0, 8), **changes))
        return [text.text for text in ask(engine(model, template, seed=seed), [request])[0].texts]

    texts = drawn(1)
    assert len(texts) == 20, "more than the capacity of 16: in two goes"
    assert len(set(texts)) > 10
    assert drawn(1) == texts
    assert drawn(2) != texts
    assert len(set(drawn(1, top_p=1e-6))) == 1, "the likeliest token alone"
    assert len(set(drawn(1, temperature=1e-4))) == 1


def test_log_probs_are_the_model_s_own_at_any_temperature(
    model: Path, template: ChatTemplate, prompts: list[list[int]], network: Any
) -> None:
    request = Request(0, prompts[0], "base", sampling=Sampling(3, 3.0, 0.5, 3))
    one = engine(model, template)
    for text in ask(one, [request])[0].texts:
        ids = template.encode(text.text)
        if len(ids) != text.n_tokens or template.tokenizer.decode(ids) != text.text:
            continue  # written in other tokens than it is read in, or with an end of turn
        score = ask(one, [Request(1, [*prompts[0], *ids], "base", scored=len(ids))])[1]
        assert text.logprob == pytest.approx(sum(score.logprobs), abs=1e-3)


def test_a_text_that_goes_on_keeps_its_first_blank(model: Path) -> None:
    """Decoders of SentencePiece tokenizers strip a blank at the beginning of whatever they are given."""
    from tokenizers import decoders

    tokenizer = ChatTemplate(model, {}).tokenizer
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    begun, more = (tokenizer.encode(text, add_special_tokens=False) for text in ("Response A", " names the capital"))

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    assert decode(more) == "names the capital"
    assert behind(decode, begun, more) == " names the capital"
    assert behind(decode, [tokenizer.eos_token_id], more) == "names the capital"


def test_stop_texts_end_a_row_and_stay_in_it(model: Path, template: ChatTemplate, prompts: list[list[int]]) -> None:
    one = engine(model, template)
    whole = ask(one, [Request(at, ids, "base", sampling=GREEDY) for at, ids in enumerate(prompts)])
    text = whole[0].texts[0].text
    middle = text[len(text) // 2 :][:2]
    asked = replace(GREEDY, stop=(middle,))
    found = ask(one, [Request(at, ids, "base", sampling=asked) for at, ids in enumerate(prompts)])
    (cut,) = found[0].texts
    assert cut.text == text[: text.index(middle) + len(middle)]
    assert cut.finish_reason == "stop"
    assert cut.n_tokens < whole[0].texts[0].n_tokens or cut.text == text
    for at in range(1, len(prompts)):
        other = whole[at].texts[0]
        assert found[at].texts[0].text == other.text.partition(middle)[0] + (middle if middle in other.text else "")


def test_kinds_are_answered_apart_and_what_cannot_succeed_at_once(
    model: Path, template: ChatTemplate, prompts: list[list[int]]
) -> None:
    one = engine(model, template, max_num_seqs=2)
    one.add(Request("a", prompts[0], "base", sampling=GREEDY))
    one.add(Request("long", prompts[1] * 9, "base", sampling=GREEDY))
    one.add(Request("scored", prompts[0], "base", scored=2))
    one.add(Request("b", prompts[1], "base", sampling=GREEDY))
    one.add(Request("c", prompts[2], "base", sampling=GREEDY))
    first = one.poll()
    assert [response.tag for response in first] == ["long", "a", "b"], "a shard may be committed after each poll"
    assert "exceed 256" in str(first[0].error)
    assert [response.tag for response in one.poll()] == ["scored"]
    assert [response.tag for response in one.poll()] == ["c"]
    with pytest.raises(StepFailedError, match="doesn't serve the model other"):
        one.add(Request("d", prompts[0], "other", sampling=GREEDY))
    one.close()


def test_an_adapter_is_served_beside_its_base(
    model: Path, template: ChatTemplate, prompts: list[list[int]], network: Any, tmp_path: Path
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(3)
    made = get_peft_model(plain, LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"))
    made.save_pretrained(tmp_path)
    served = Served(model, "base", tmp_path, "adapted")
    one = engine(model, template, served=served)
    asked = [Request(name, prompts[3], name, scored=4) for name in ("base", "adapted")]
    found = ask(one, asked)
    again = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, judge in (("base", network), ("adapted", PeftModel.from_pretrained(again, tmp_path).eval())):
        with torch.no_grad():
            logprobs = judge(input_ids=torch.tensor([prompts[3]])).logits[0].log_softmax(-1)
        wanted = [float(logprobs[place - 1, prompts[3][place]]) for place in range(-4, 0)]
        assert found[name].logprobs == pytest.approx(wanted, abs=1e-4)
    assert found["base"].logprobs != pytest.approx(found["adapted"].logprobs, abs=1e-2)


def test_a_missing_library_is_one_sentence(
    model: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"engine\.kind is transformers but it can't be imported"):
        engine(model, template)


def test_what_only_vllm_has_is_refused(tmp_path: Path) -> None:
    config = small.config(tmp_path, engine={"kind": "transformers", "quantization": "fp8", "tensor_parallel": 2})
    said = [problem for problem in check(config) if problem.startswith("engine.")]
    assert said == [
        "engine.quantization: `fp8` is of vLLM, and engine.kind transformers has no such thing; take it out.",
        "engine.tensor_parallel: `2` is of vLLM, and engine.kind transformers has no such thing; take it out.",
    ]


@pytest.mark.usefixtures("no_fsync")
def test_a_run_trains_and_is_judged_by_it(model: Path, tmp_path: Path) -> None:
    """The whole loop, with TRL: parity, evaluation, samples in shards, and another checkpoint."""
    config = taught.described(tmp_path, model, ENGINE)
    store = open_store(config.store)
    run = open_run(store, create_run(store, config), lambda work: InlineLauncher(), kind=Run, listen=lambda event: None)
    assert star(run).number == 1
    manifests = [store.manifest(used.key) for used in read_history(store, run.run_id).used]
    parity = [one for one in manifests if one is not None and one.step == "parity"]
    assert len(parity) == 2
    assert all(one.facts["to_trained"] < 0.05 < one.facts["to_start"] for one in parity)
    (sampled,) = [one for one in manifests if one is not None and one.step == "sample"]
    assert sampled.facts["engine"]["settings"]["kind"] == "transformers"
    assert len(sampled.artifact("completions").files) > 1
    evaluated = [one for one in manifests if one is not None and one.step == "evaluate"]
    assert evaluated
    assert all(store.read(one.artifact("completions"))["prob_a"].null_count == 0 for one in evaluated)
