"""Find what the sections of a run contradict each other in, before any model is touched."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from configs.run import (
    HINT_WORDS,
    LORA_MIN_LEARNING_RATE,
    EngineConfig,
    EngineKind,
    Method,
    RationalizeConfig,
    RunConfig,
    Source,
)

PLACEHOLDERS = ("prompt", "response_a", "response_b")
VERDICTS = ("[[A]]", "[[B]]")
VLLM_MAX_LORA_RANK = 512
PACKAGE = "package:"
COMMIT = re.compile(r"[0-9a-f]{40}")
VERDICT_TOKENS = 8  # `[[A]]` and the end of turn, whatever the tokenizer
RESERVED = {"dev", "test", "bootstrap", "dropped"}

# Arguments of vLLM that a key of ours sets: through `engine.extra` they would slip past the step keys.
NAMED_ELSEWHERE = {
    "model": "model.base",
    "tokenizer": "model.base",
    "revision": "model.revision",
    "tokenizer_revision": "model.revision",
    "max_model_len": "model.max_len",
    "dtype": "engine.dtype",
    "quantization": "engine.quantization",
    "kv_cache_dtype": "engine.kv_cache_dtype",
    "tensor_parallel_size": "engine.tensor_parallel",
    "gpu_memory_utilization": "engine.gpu_memory",
    "enforce_eager": "engine.enforce_eager",
    "max_num_seqs": "engine.max_num_seqs",
    "seed": "seed",
    "enable_lora": "train.lora",
    "max_lora_rank": "train.lora.r",
    "distributed_executor_backend": "engine.in_process",
}


@dataclass(frozen=True)
class Conflict:
    """Hold one contradiction: the keys it is between, the first one to be shown, and the rest of the sentence."""

    keys: tuple[str, ...]
    text: str


def check(config: RunConfig) -> list[str]:
    """Give one sentence for each contradiction: where, what, what to do; reads no more than the names of files."""
    return [f"{conflict.keys[0]}: {conflict.text}." for conflict in conflicts(config)]


def conflicts(config: RunConfig) -> list[Conflict]:
    """Give every contradiction with the keys it is between."""
    found: list[Conflict] = []
    for part in (
        _model,
        _interpreters,
        _sources,
        _split,
        _prompt,
        _engine,
        _sampling,
        _repairing,
        _rationalizing,
        _selection,
        _training,
        _evaluation,
    ):
        found += [Conflict(tuple(keys.split()), text) for keys, text in part(config)]
    return found


Found = Iterator[tuple[str, str]]  # keys, parted by blanks; text


def _model(config: RunConfig) -> Found:
    base, revision = config.model.base, config.model.revision
    if base.startswith(PACKAGE) or Path(base).is_dir():
        return
    if not is_hub_id(base):
        yield "model.base", f"`{base}` is no folder here, no `{PACKAGE}NAME` and no hub id (`owner/name`); correct it"
    elif revision is None:
        yield (
            "model.revision model.base",
            f"the hub id `{base}` (no folder of that name is here) needs a commit, so that it stays the same; "
            "set the 40 hex digits that the hub shows under Files, History",
        )
    elif not COMMIT.fullmatch(revision):
        yield (
            "model.revision",
            f"`{revision}` is no commit, and a branch or tag can move; give the 40 hex digits of a commit",
        )


def _interpreters(config: RunConfig) -> Found:
    for name, python in config.interpreters:
        if python is not None and shutil.which(Path(python).expanduser()) is None:
            yield f"interpreters.{name}", f"`{python}` is no program on this machine; give the path of a Python"


def is_hub_id(base: str) -> bool:
    """Say whether a name is one of the Hugging Face hub: `owner/name`, and no folder of that name exists here."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None and base[0] not in ".-" and not Path(base).is_dir()


def _sources(config: RunConfig) -> Found:
    named = {f"data.sources.{i}": source for i, source in enumerate(config.data.sources)}
    named |= {f"data.suites.{i}": suite for i, suite in enumerate(config.data.suites)}
    counts = Counter(source.name for source in named.values())
    for key, source in named.items():
        if counts[source.name] > 1:
            counts[source.name] = 0  # one sentence a name
            yield f"{key}.name", f"`{source.name}` names more than one source or suite; give each a name of its own"
        if source.name in RESERVED or source.name.startswith("part-"):
            yield f"{key}.name", f"`{source.name}` is the name of a set of the split; choose another"
        if source.path is not None and (problem := _unreadable(source.path)):
            yield f"{key}.path", problem
        yield from _hub(key, source)
    for (one, left), (other, right) in combinations(named.items(), 2):
        if _same_rows(left, right):
            yield f"{other} {one}", f"holds the same pairs as {one}, so they would count twice; leave one out"
    bootstrap = config.bootstrap
    if bootstrap and bootstrap.rationales == "generator":
        if not any(source.generator and source.generator.rationales for source in config.data.sources):
            yield (
                "bootstrap.rationales data.sources",
                "`generator` needs a source with a `generator` in data.sources; name a file of rationales instead",
            )
    elif bootstrap and (problem := _unreadable(bootstrap.rationales)):
        yield "bootstrap.rationales", problem
    if problem := _bad_address(config.store):
        yield "store", problem


def _same_rows(left: Source, right: Source) -> bool:
    origins = ("path", "hub", "config", "split", "generator")
    return all(getattr(left, origin) == getattr(right, origin) for origin in origins)


def _hub(key: str, source: Source) -> Found:
    """Check that a data set of the hub is named and pinned, and that nothing of it stands beside another origin."""
    if source.hub is None:
        for name in ("revision", "config", "split"):
            if getattr(source, name) is not None:
                yield (
                    f"{key}.{name} {key}.hub",
                    "belongs to a source of the hub; set `hub: owner/name`, or leave it out",
                )
    elif not is_hub_id(source.hub):
        yield f"{key}.hub", f"`{source.hub}` is no id of the hub; write `owner/name`, or name a file by `path`"
    elif source.revision is None or not COMMIT.fullmatch(source.revision):
        given = "no commit is set" if source.revision is None else f"`{source.revision}` is no commit"
        yield (
            f"{key}.revision {key}.hub",
            f"{given}, and a branch or tag can move; set the 40 hex digits that the hub shows under Files, History",
        )


def _unreadable(path: str) -> str | None:
    """Say why no rows can come from a path, as far as its name tells."""
    if "://" in path:
        named = path.removeprefix("s3://").partition("/")[2]
        return _bad_address(path) or (None if named else f"`{path}` names a bucket and no object; add it")
    local = Path(path).expanduser()
    if local.is_dir():
        return f"{local.absolute()} is a folder; name one file of pairs in it, one source a file"
    return None if local.exists() else f"there is no file at {local.absolute()}; correct the path"


def _bad_address(url: str) -> str | None:
    if "://" not in url:
        return None if url.strip() else "is empty; name a folder or `s3://bucket/prefix`"
    if re.match(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/|\Z)", url):
        return None
    return f"`{url}` is no address that can be used; write `s3://bucket/prefix` (no user, no port) or a local path"


def _split(config: RunConfig) -> Found:
    split = config.split
    if split.dev + split.test >= 1:
        yield (
            "split.dev split.test",
            f"{split.dev:g} and split.test {split.test:g} leave no pair to train on; keep the sum below 1",
        )
    if config.bootstrap is not None and split.bootstrap == 0:
        yield "split.bootstrap bootstrap", "a warm start needs pairs of its own; set how many, or set `bootstrap: null`"
    if config.bootstrap is None and split.bootstrap > 0:
        yield (
            "split.bootstrap bootstrap",
            f"sets {split.bootstrap} pairs apart for no warm start; set the section `bootstrap`, or 0",
        )
    if split.dev == 0 and (config.gate.on_worse == "stop" or config.gate.min_parse_rate > 0):
        yield (
            "split.dev gate",
            "the gate decides on dev pairs and there are none; raise it, or set gate.on_worse to continue",
        )


def _prompt(config: RunConfig) -> Found:
    prompt = config.prompt
    found = Counter(re.findall(r"\{([A-Za-z_][A-Za-z0-9_]*)\}", prompt.user))
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    if unknown := [name for name in found if name not in PLACEHOLDERS]:
        yield "prompt.user", f"has the unknown placeholder {{{unknown[0]}}}; there are {known}"
    if missing := [f"{{{name}}}" for name in PLACEHOLDERS if not found[name]]:
        yield "prompt.user", f"lacks {', '.join(missing)}; write each of {known} once"
    for name in PLACEHOLDERS:
        if found[name] > 1:
            yield "prompt.user", f"has the placeholder {{{name}}} {found[name]} times; write each of {known} once"
    system = prompt.system or ""
    for name in PLACEHOLDERS:
        if f"{{{name}}}" in system:
            yield (
                "prompt.system",
                f"has the placeholder {{{name}}}, which is filled in prompt.user alone; move it there",
            )
    for index, shot in enumerate(prompt.few_shot):
        for name in (*PLACEHOLDERS, "rationale"):
            if not getattr(shot, name).strip():
                yield f"prompt.few_shot.{index}.{name}", "is empty; write the example out"
        if any(verdict in shot.rationale for verdict in VERDICTS):
            yield (
                f"prompt.few_shot.{index}.rationale",
                "holds a verdict, which is added from the key `verdict`; take it out",
            )
    told = all(verdict in system + prompt.user for verdict in VERDICTS) or prompt.few_shot or config.bootstrap
    if not told and config.method is not Method.GENRM and config.engine.kind is not EngineKind.SCRIPTED:
        yield (
            "prompt.user",
            "nothing tells the judge to end with [[A]] or [[B]]; say it, or give prompt.few_shot or a bootstrap",
        )


def _engine(config: RunConfig) -> Found:
    for name in config.engine.extra:
        ours = NAMED_ELSEWHERE.get(name.replace("-", "_"))
        if ours is not None:
            yield f"engine.extra.{name} {ours}", f"is set by {ours}; set it there, where the step keys see it"
    if config.engine.kind is EngineKind.TRANSFORMERS:
        for name in ("quantization", "kv_cache_dtype", "tensor_parallel"):
            value, default = getattr(config.engine, name), EngineConfig.model_fields[name].default
            if value != default:
                yield (
                    f"engine.{name} engine.kind",
                    f"`{value}` is of vLLM, and engine.kind transformers has no such thing; take it out",
                )
    served = config.engine.kind is EngineKind.VLLM and config.engine.adapter == "serve"
    if served and config.train.lora and config.train.lora.r > VLLM_MAX_LORA_RANK:
        yield (
            "train.lora.r",
            f"{config.train.lora.r} is over vLLM's limit; use at most {VLLM_MAX_LORA_RANK}, or engine.adapter=merge",
        )


def _sampling(config: RunConfig) -> Found:
    sample = config.sample
    if sample.max_tokens >= config.model.max_len:
        yield (
            "sample.max_tokens model.max_len",
            f"{sample.max_tokens} leaves no room for the prompt within model.max_len {config.model.max_len}; "
            "lower it, or raise that",
        )
    if sample.n > 1 and sample.temperature == 0:
        yield "sample.temperature sample.n", f"0 draws the same text {sample.n} times; raise it, or set sample.n to 1"
    for index, stop in enumerate(sample.stop):
        if not stop:
            yield f"sample.stop.{index}", "is empty; take it out"
        elif any(stop in verdict and not verdict.endswith(stop) for verdict in VERDICTS):
            yield f"sample.stop.{index}", f"`{stop}` cuts the verdict itself off; choose a text that cannot begin one"


def _repairing(config: RunConfig) -> Found:
    asked, method = config.repair, config.method
    if (asked.tokens or asked.redraws) and method not in (Method.STAR_SFT, Method.STAR_DPO):
        key = "tokens" if asked.tokens else "redraws"
        yield f"repair.{key} method", f"mends what `sample` wrote, and {method} has no such step; set it to 0"
    if asked.redraws and config.sample.temperature == 0:
        yield "repair.redraws sample.temperature", "at temperature 0 every draw is the same text; set it to 0"


def _rationalizing(config: RunConfig) -> Found:
    asked, method = config.rationalize, config.method
    names = re.findall(r"\{(\w*)\}", asked.hint)
    if "verdict" not in names:
        yield "rationalize.hint", "lacks {verdict}, the letter that it is to show; write it"
    if unknown := [name for name in names if name != "verdict"]:
        yield "rationalize.hint", f"has the unknown placeholder {{{unknown[0]}}}; there is {{verdict}}"
    if names == ["verdict"] and len(re.findall(r"[^\W_]+", asked.hint)) < HINT_WORDS:
        yield "rationalize.hint", f"is found in a text by {HINT_WORDS} words in a row; write at least as many"
    if asked.failures and asked.n > 1 and config.sample.temperature == 0:
        yield (
            "sample.temperature rationalize.n",
            f"0 draws the same text {asked.n} times; raise it or set n to 1",
        )
    sampled = method in (Method.STAR_SFT, Method.STAR_DPO)
    if asked.failures and not sampled:
        why = "asks with the answer shown for every pair" if method is Method.STAR_RATIONALIZER else "samples nothing"
        yield "rationalize.failures method", f"there are no failures to ask again for, since {method} {why}; set false"
    if asked.failures and method is Method.STAR_DPO and not asked.off_policy_chosen:
        yield (
            "rationalize.failures rationalize.off_policy_chosen",
            "star-dpo can use a hinted completion as the chosen side alone, which is off-policy; "
            "set rationalize.off_policy_chosen to true as well, or this to false",
        )
    if asked.off_policy_chosen and not (asked.failures and method is Method.STAR_DPO):
        yield (
            "rationalize.off_policy_chosen rationalize.failures method",
            "needs method star-dpo and rationalize.failures; set them, or this to false",
        )
    if asked.failures and config.select.min_right > 0:
        yield (
            "select.min_right rationalize.failures",
            f"{config.select.min_right:g} drops every pair that failed, so asking again yields nothing; set one to 0",
        )
    for name in ("n", "max_share"):
        if not asked.failures and getattr(asked, name) != RationalizeConfig.model_fields[name].default:
            yield f"rationalize.{name} rationalize.failures", "is of no use without rationalize.failures; set that too"


def _selection(config: RunConfig) -> Found:
    select = config.select
    if select.min_right > select.max_right:
        yield (
            "select.min_right select.max_right",
            f"{select.min_right:g} is above select.max_right {select.max_right:g}, so no pair passes; swap them",
        )
    if select.max_right == 0:
        yield "select.max_right", "0 keeps only pairs without a right answer, which yield no row; raise it"
    if config.method is Method.GENRM:
        yield from _unselected(config)
    if config.method is Method.STAR_RATIONALIZER:
        for name, neutral in (("min_right", 0), ("max_right", 1)):
            if (share := getattr(select, name)) != neutral:
                text = f"{share:g} is a share of unhinted samples, and star-rationalizer has none; set {neutral}"
                yield f"select.{name} method", text
    if config.method is not Method.STAR_DPO:
        return
    if config.sample.n < 2:
        text = f"{config.sample.n} can't give a right and a wrong rationale, and star-dpo needs both; set 2 or more"
        yield "sample.n method", text
    if select.keep_per_pair not in (None, 1):
        yield (
            "select.keep_per_pair method",
            f"{select.keep_per_pair} means nothing to star-dpo, which pairs right with wrong rationales; "
            "set pairs.max_per_pair",
        )
    if select.min_right == 1:
        yield "select.min_right method", "1 keeps only pairs without a wrong rationale, star-dpo needs one; lower it"


def _unselected(config: RunConfig) -> Found:
    """Find what asks genrm, which trains on every pair and writes nothing, to choose or to parse."""
    neutral = {"keep_per_pair": (None, 1), "min_right": (0,), "max_right": (1,), "balance": (False,)}
    for name, values in neutral.items():
        if (value := getattr(config.select, name)) not in values:
            text = f"`{str(value).lower()}` means nothing to genrm, which trains on every pair; take it out"
            yield f"select.{name} method", text
    if config.sample.max_tokens < VERDICT_TOKENS:
        text = f"{config.sample.max_tokens} leaves no room for the trained verdict; set {VERDICT_TOKENS} or more"
        yield "sample.max_tokens method", text
    if config.gate.min_parse_rate > 0:
        text = f"{config.gate.min_parse_rate:g} means nothing to genrm, which writes no verdict to parse; set 0"
        yield "gate.min_parse_rate method", text


def _training(config: RunConfig) -> Found:
    train = config.train
    if train.batch_size % train.per_device_batch:
        yield (
            "train.per_device_batch train.batch_size",
            f"{train.per_device_batch} doesn't divide train.batch_size {train.batch_size}; choose a divisor",
        )
    elif train.batch_size % (together := train.per_device_batch * train.processes):
        yield (
            "train.batch_size train.per_device_batch train.processes",
            f"{train.batch_size} is no multiple of train.per_device_batch {train.per_device_batch} x train.processes "
            f"{train.processes} = {together} rows that are trained at a time; set one",
        )
    if train.processes > 1 and train.resume == "store":
        yield (
            "train.resume train.processes",
            "`store` keeps the state of one process, and train.processes asks for more; set local or off",
        )
    rates = [("train.learning_rate", train.learning_rate)]
    if config.bootstrap and config.bootstrap.learning_rate is not None:
        rates.append(("bootstrap.learning_rate", config.bootstrap.learning_rate))
    for key, rate in rates:
        if train.lora and rate < LORA_MIN_LEARNING_RATE:
            yield (
                f"{key} train.lora",
                f"{rate:g} hardly moves a LoRA adapter; set {LORA_MIN_LEARNING_RATE:g} or more (1e-4 is usual), "
                "or `train.lora: null`",
            )
    if train.reference == "previous" and config.method is not Method.STAR_DPO:
        yield (
            "train.reference method",
            f"`previous` means nothing to {config.method}, which has no reference model; set base",
        )


def _evaluation(config: RunConfig) -> Found:
    evaluate = config.evaluate
    for key in ("votes", "dev_votes"):
        votes = getattr(evaluate, key)
        if evaluate.temperature == 0 and votes > 1:
            text = f"{votes} votes at temperature 0 are one vote; set 1, or raise the temperature"
            yield f"evaluate.{key} evaluate.temperature", text
