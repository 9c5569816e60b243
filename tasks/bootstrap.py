"""Build the warm start's rows from rationales of another source (paper, Table 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storage.schema import Split
from tasks import pairs
from tasks.judge import prompts, verdict
from tasks.split import committed_split
from tasks.step import Context, Step

if TYPE_CHECKING:
    from configs.run import RunConfig
    from storage.manifest import Manifest

VERSION = 1


def bootstrap_step(config: RunConfig, split: Manifest) -> Step:
    """Name the step by the rationales, which the split step stored beside the pairs."""
    inputs = {name: split.artifacts[name].digest for name in ("pairs", "splits", "rationales")}
    parts = {
        "prompt": prompts.prompt_digest(config.prompt),
        "prompt_version": prompts.VERSION,
        "rows": pairs.VERSION,
        "parser": verdict.VERSION,
        "seed": config.seed,
    }
    return Step("bootstrap", VERSION, inputs, parts)


def make_bootstrap(context: Context, split: Manifest) -> dict[str, Any]:
    """Give one SFT row a rationale of the pairs set apart for the warm start."""
    view = committed_split(context, split.key)
    rationales = context.store.read(split.artifacts["rationales"])
    rows, dropped = pairs.rationale_rows(rationales, view.pairs(Split.BOOTSTRAP), context.config.prompt)
    counts = {"in": rationales.num_rows, "kept": rows.num_rows, "dropped": dropped}
    return {"tables": {"sft": pairs.shuffle(rows, seed=context.config.seed)}, "counts": counts}
