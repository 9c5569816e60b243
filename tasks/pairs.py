"""Build training rows: (prompt, completion) for SFT, (prompt, chosen, rejected) for DPO, in TRL's conversational form.

The prompt is always the judge's own, without a hint. A completion ends with its verdict: what the model wrote behind
it is cut off, so nothing learns to ramble on. A rejected text without any verdict stays whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from configs.run import Method, key_part
from storage.errors import StepFailedError
from storage.schema import JUDGMENT_ID, SCHEMAS, Status
from tasks import generation
from tasks.judge import draw, frames, prompts, verdict
from tasks.judge.matching import DPO_ID, count_reasons, match
from tasks.judge.votes import BY_ORDER
from tasks.step import Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from configs.run import PairsConfig, PromptConfig, RunConfig
    from storage.manifest import Manifest
    from tasks.step import Context

VERSION = 1

BOOTSTRAP = "bootstrap"  # stands for the checkpoint of rationales from another source

_ID = [*BY_ORDER, "sample", "hinted"]


def sft_rows(selected: pa.Table, completions: pa.Table, pairs: pa.Table, prompt_config: PromptConfig) -> pa.Table:
    """Make one `sft` row of every selected judgment, sorted by its id."""
    rows = frames.frame(selected.select(list(JUDGMENT_ID)))
    return sft_table(_with_texts(rows, completions).sort(JUDGMENT_ID), pairs, prompt_config)


def sft_table(rows: pl.DataFrame, pairs: pa.Table, config: PromptConfig) -> pa.Table:
    """Make `sft` rows of judgment ids and their texts."""
    columns = dict(zip(JUDGMENT_ID, frames.plain(rows.select(JUDGMENT_ID)).columns, strict=True))
    columns |= {"prompt": _prompts(rows, pairs, config), "completion": _turns(rows["text"])}
    return pa.table(columns).cast(SCHEMAS["sft"])


def _with_texts(rows: pl.DataFrame, completions: pa.Table) -> pl.DataFrame:
    texts = frames.frame(completions.select([*JUDGMENT_ID, "text"]))
    found = texts.join(rows, on=JUDGMENT_ID, how="inner")
    if found.height != rows.height:
        raise StepFailedError(
            f"{rows.height} selected judgments meet {found.height} completions; give the completions that were judged"
        )
    return found


def _turns(texts: pl.Series) -> pa.Array:
    return prompts.completion_column(verdict.cut(texts).to_arrow(compat_level=pl.CompatLevel.oldest()))


def _prompts(rows: pl.DataFrame, pairs: pa.Table, config: PromptConfig) -> pa.Array:
    """Render each pair and order that occurs once, and give every row its prompt."""
    places = frames.frame(pairs.select(["pair_id"])).with_row_index("place")
    asked = rows.select("pair_id", "order").unique().sort("pair_id", "order").with_row_index("asked")
    asked = asked.join(places, on="pair_id", how="left", validate="m:1", maintain_order="left")
    if lost := asked["place"].null_count():
        raise StepFailedError(f"{lost} selected pairs are not among the pairs given; give the pairs that were judged")
    rendered = prompts.render(pairs.take(pa.array(asked["place"].to_numpy())), asked["order"].to_list(), config)
    which = rows.select("pair_id", "order").join(asked, on=["pair_id", "order"], how="left", maintain_order="left")
    return rendered.column("prompt").combine_chunks().take(pa.array(which["asked"].to_numpy()))


def dpo_rows(
    selected: pa.Table,
    completions: pa.Table,
    pairs: pa.Table,
    prompt_config: PromptConfig,
    config: PairsConfig,
    *,
    seed: int,
) -> tuple[pa.Table, dict[str, int]]:
    """Pair right with wrong judgments of one pair, order and checkpoint; give `dpo` and the unused by reason.

    Up to `max_per_pair` rows a pair and order, matched by lot: each right one is used once before any is used twice.
    Texts without a verdict are rejected only where wrong ones don't suffice, and cut by lot to
    `unparsed_rejected_share` of all rows. The counts are of selected judgments: used + sum(unused) = selected.
    """
    matched = match(selected, config, seed=seed)
    return _dpo(matched.rows, completions, pairs, prompt_config), matched.unused


def _dpo(rows: pl.DataFrame, completions: pa.Table, pairs: pa.Table, config: PromptConfig) -> pa.Table:
    names = {side: [*BY_ORDER, f"{side}_sample", f"{side}_hinted"] for side in ("chosen", "rejected")}
    used = pl.concat(
        [rows.select(pl.col(ids).alias(to) for ids, to in zip(names[side], _ID, strict=True)) for side in names]
    )
    texts = _with_texts(used.unique(), completions)
    columns = dict(zip(DPO_ID, frames.plain(rows.select(DPO_ID)).columns, strict=True))
    columns["prompt"] = _prompts(rows, pairs, config)
    for side, ids in names.items():
        found = rows.join(texts, left_on=ids, right_on=_ID, how="left", validate="m:1", maintain_order="left")
        columns[side] = _turns(found["text"])
    return pa.table(columns).cast(SCHEMAS["dpo"])


def pairs_step(
    config: RunConfig,
    split: Manifest,
    completions: Mapping[str, Manifest],
    *,
    selected: Manifest,
    earlier: Manifest | None,
) -> Step:
    """Name the step by what was selected and said, and by the rows before where they are trained on again."""
    name = artifact(config)
    again = earlier if config.pairs.data == "cumulative" and earlier and name in earlier.artifacts else None
    inputs = {
        "selected": selected.artifact("selected").digest,
        **generation.digests(completions),
        "pairs": split.artifact("pairs").digest,
        "earlier": again.artifact(name).digest if again else None,
    }
    parts: dict[str, Any] = {"artifact": name, "seed": config.seed, "data": config.pairs.data}
    if name == "dpo":
        parts["pairs"] = key_part(config.pairs)
    versions = {
        "prompt": prompts.prompt_digest(config.prompt),
        "prompt_version": prompts.VERSION,
        "parser": verdict.VERSION,
    }
    return Step("pairs", VERSION, inputs, {**parts, **versions})


def artifact(config: RunConfig) -> str:
    """Name what the iterations train on: `sft` or `dpo` rows."""
    return "dpo" if config.method is Method.STAR_DPO else "sft"


def make_rows(
    context: Context,
    split: Manifest,
    completions: Mapping[str, Manifest],
    *,
    selected: Manifest,
    earlier: Manifest | None,
) -> dict[str, Any]:
    """Build an iteration's rows, with those before where the config says so, in a seeded order."""
    config, read = context.config, context.store.read
    chosen, name = read(selected.artifact("selected")), artifact(config)
    written = generation.read_all(context.store, completions)
    given = chosen, written, read(split.artifact("pairs")), config.prompt
    unused: dict[str, int] = {}
    if name == "dpo":
        rows, unused = dpo_rows(*given, config.pairs, seed=config.seed)
    else:
        rows = sft_rows(*given)
    fresh = rows.num_rows
    if config.pairs.data == "cumulative" and earlier is not None and name in earlier.artifacts:
        rows = concat(read(earlier.artifact(name)), rows)
    hinted = pc.sum(rows["chosen_hinted" if name == "dpo" else "hinted"]).as_py() or 0
    counts = {"in": chosen.num_rows, "kept": chosen.num_rows - sum(unused.values()), "dropped": unused}
    yielded = yields(read(selected.artifact("judgments")), rows)
    return {
        "tables": {name: shuffle(rows, seed=config.seed)},
        "counts": counts,
        "facts": {"fresh": fresh, "hinted": hinted, "earlier": rows.num_rows - fresh, "yields": yielded},
    }


def yields(judgments: pa.Table, rows: pa.Table) -> dict[str, int]:
    """Count the (pair, checkpoint, order)s of judgments: `asked`, `with_rows`, and why the others have no row.

    `all_right` and `none_right` say what the samples were; `other` were left out by the band, a limit or the balance.
    """
    right = pl.col("status") == Status.CORRECT.value
    asked = frames.frame(judgments.select([*BY_ORDER, "status"])).group_by(BY_ORDER).agg(right.sum(), pl.len())
    barren = asked.join(frames.frame(rows.select(list(BY_ORDER))), on=BY_ORDER, how="anti")
    all_right = barren.filter(pl.col("status") == pl.col("len")).height
    none_right = barren.filter(pl.col("status") == 0).height
    return {
        "asked": asked.height,
        "with_rows": asked.height - barren.height,
        "all_right": all_right,
        "none_right": none_right,
        "other": barren.height - all_right - none_right,
    }


def rationale_rows(
    rationales: pa.Table, pairs: pa.Table, prompt_config: PromptConfig
) -> tuple[pa.Table, dict[str, int]]:
    """Make `sft` rows of another source's rationales (checkpoint `bootstrap`, sample 0); count the dropped by reason.

    Only right verdicts train, as in select. The others are dropped by their status, rationales of pairs that are not
    given as `pair_not_given`, later ones of the same pair and order as `duplicate`.
    """
    rows = _as_completions(rationales)
    known = pl.col("pair_id").is_in(frames.frame(pairs.select(["pair_id"]))["pair_id"].implode())
    first = pl.int_range(pl.len()).over("pair_id", "order") == 0
    bad = pl.when(~known).then(pl.lit("pair_not_given")).when(~first).then(pl.lit("duplicate"))
    rows = rows.with_columns(bad.alias("reason"))
    fine = rows.filter(pl.col("reason").is_null())
    statuses = frames.frame(verdict.judge(frames.table(fine, "completions"), pairs))["status"]
    right = fine.filter(statuses == Status.CORRECT.value).sort(JUDGMENT_ID)
    dropped = pl.concat(
        [rows["reason"].drop_nulls(), statuses.filter(statuses != Status.CORRECT.value).alias("reason")]
    )
    return sft_table(right, pairs, prompt_config), count_reasons(dropped)


def _as_completions(rationales: pa.Table) -> pl.DataFrame:
    return frames.frame(rationales).with_columns(
        pl.lit(BOOTSTRAP).alias("checkpoint"),
        pl.lit(0, pl.Int32).alias("sample"),
        pl.lit(False).alias("hinted"),
        pl.lit("stop").alias("finish_reason"),
        *(pl.lit(None, dtype).alias(name) for name, dtype in _UNKNOWN.items()),
    )


_UNKNOWN = {"n_tokens": pl.Int32, "logprob": pl.Float64, "prob_a": pl.Float64, "error": pl.String}


def concat(previous: pa.Table, fresh: pa.Table) -> pa.Table:
    """Put the rows so far and this iteration's together (`pairs.data: cumulative`); both `sft` or both `dpo`."""
    return pa.concat_tables([previous, fresh])


def shuffle(rows: pa.Table, *, seed: int) -> pa.Table:
    """Bring `sft` or `dpo` rows into an order drawn from seed and ids; the order they come in leaves no trace."""
    sides = [""] if "sample" in rows.column_names else ["chosen_", "rejected_"]
    keys = []
    for side in sides:
        ids = rows.select([*BY_ORDER, f"{side}sample", f"{side}hinted"]).rename_columns(_ID)
        keys.append(draw.lots(frames.frame(ids), seed, purpose="shuffle").to_numpy())
    return rows.take(pa.array(np.lexsort(keys[::-1])))
