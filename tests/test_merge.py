"""Merged weights answer as base and adapter do together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tasks.training.merge import merge_adapter
from tests.tiny_model import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_merged_weights_equal_base_and_adapter(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = tiny_model(tmp_path / "base")
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(
        network, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(5, 25).unsqueeze(0)

    def logits(model: PeftModel) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(ids).logits

    out = tmp_path / "merged"
    out.mkdir()
    (out / "stale.json").write_text("{}")
    folder = merge_adapter(base, tmp_path / "adapter", out, dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    untouched = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert torch.allclose(logits(merged), logits(adapted), atol=1e-4)
    assert not torch.allclose(logits(merged), logits(untouched), atol=1e-2)
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not (folder / "stale.json").exists(), "an older merge must not leak into a new one"
