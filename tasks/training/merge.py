"""Merge an adapter into its base for an engine that can't serve adapters fast."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def merge_adapter(base: Path, adapter: Path, out: Path, *, dtype: str) -> Path:
    """Write base + adapter as whole weights into `out`, made anew; merged in fp32, stored in the engine's dtype."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    shutil.rmtree(out, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    merged.to(getattr(torch, dtype)).save_pretrained(out)
    for file in base.iterdir():  # tokenizer, template and the rest stay the base's
        if file.is_file() and not (out / file.name).exists() and file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
    return out
