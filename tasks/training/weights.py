"""Load weights to train, measure how far they moved, and save them without pickles."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, set_seed

from storage.errors import StepFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from configs.run import LoraConfig
    from tasks.training.request import ModelFolder, TrainRequest

ADAPTER = "default"
NEUTRAL_BASE = "base"  # a path would make the digest of an adapter depend on the machine
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_BESIDE = {".json", ".jinja", ".txt", ".model"}


def on_cuda() -> bool:
    """Say whether there is a GPU; the one place that asks."""
    return bool(torch.cuda.is_available())


def load_policy(request: TrainRequest) -> Any:
    """Load what is trained: all weights as fp32 masters, or an fp32 adapter on frozen weights.

    The frozen weights are bf16 on CUDA. On a CPU they are fp32: without AMX bf16 products are several times slower.
    """
    set_seed(request.seed)
    lora = request.config.lora
    base = _load_base(request.start.base, torch.bfloat16 if lora and on_cuda() else torch.float32)
    if lora is None:
        return base
    wanted = _peft_config(lora)
    if request.start.adapter is None:
        return get_peft_model(base, wanted, adapter_name=ADAPTER)
    policy = PeftModel.from_pretrained(base, request.start.adapter, adapter_name=ADAPTER, is_trainable=True)
    found = policy.peft_config[ADAPTER]
    found.base_model_name_or_path = str(request.start.base)
    if (found.r, found.lora_alpha) != (lora.r, lora.alpha):
        raise StepFailedError(
            f"train.lora: r {lora.r} and alpha {lora.alpha} differ from r {found.r} and alpha {found.lora_alpha} "
            "of the adapter to continue; set train.init_from to base, or the adapter's own values"
        )
    return policy


def load_frozen(model: ModelFolder) -> Any:
    """Load a model that is only read: the DPO reference."""
    base = _load_base(model.base, torch.bfloat16 if on_cuda() else torch.float32)
    if model.adapter is None:
        return base.eval()
    return PeftModel.from_pretrained(base, model.adapter, adapter_name=ADAPTER).eval()


def _load_base(folder: Path, dtype: torch.dtype) -> Any:
    return _read_base(folder, dtype).to("cuda" if on_cuda() else "cpu")


def _read_base(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, trust_remote_code=False)


def _peft_config(lora: LoraConfig) -> PeftLoraConfig:
    target = lora.target if lora.target == "all-linear" else lora.target.split(",")
    return PeftLoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=target, task_type="CAUSAL_LM"
    )


def adapter_state(policy: Any) -> dict[str, torch.Tensor]:
    """Copy the adapter's tensors, as they are saved."""
    state = get_peft_model_state_dict(policy, adapter_name=ADAPTER, save_embedding_layers=False)
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in state.items()}


def adapter_change(policy: Any, start: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Compare an adapter with its start.

    `share_changed` counts adapter entries; `relative_change` is the Frobenius norm of the change of all effective
    deltas, scale x (B1 A1 - B0 A0), over the norm of the frozen weights they are added to.
    """
    end = adapter_state(policy)
    changed = sum(int((end[name] != tensor).sum()) for name, tensor in start.items())
    moved = weight = 0.0
    for name, layer in policy.get_base_model().named_modules():
        if ADAPTER not in getattr(layer, "lora_A", {}):
            continue
        a, b = (f"base_model.model.{name}.lora_{letter}.weight" for letter in "AB")
        down = torch.cat([end[a], start[a]]).double()
        up = torch.cat([end[b], -start[b]], dim=1).double()
        # |UD|^2 = tr((U'U)(DD')): products of r x r in place of the weight's own size
        moved += float(((up.T @ up) * (down @ down.T)).sum().clamp(min=0)) * layer.scaling[ADAPTER] ** 2
        weight += float(layer.get_base_layer().weight.detach().float().norm()) ** 2
    return _change(changed, sum(tensor.numel() for tensor in start.values()), moved, weight)


def full_change(policy: Any, start: ModelFolder) -> dict[str, float]:
    """Compare all weights, already rounded to bf16, with the start's; entry by entry."""
    before = dict(_read_base(start.base, torch.float32).named_parameters())  # on the CPU: the GPU is full now
    changed = total = 0
    moved = weight = 0.0
    for name, parameter in policy.named_parameters():
        old, new = before[name].detach().float(), parameter.detach().to("cpu").float()
        changed += int((new != old.to(torch.bfloat16).float()).sum())
        total += new.numel()
        moved += float((new - old).double().norm()) ** 2
        weight += float(old.double().norm()) ** 2
    return _change(changed, total, moved, weight)


def _change(changed: int, total: int, moved: float, weight: float) -> dict[str, float]:
    return {"share_changed": changed / total, "relative_change": (moved / weight) ** 0.5 if weight else 0.0}


def whole_policy(trainer: Any, start: ModelFolder) -> Any:
    """Give the trained model in one piece, on rank 0; where it is cut into shards every process must call this."""
    if not trainer.is_fsdp_enabled:
        return trainer.model
    state = trainer.accelerator.get_state_dict(trainer.model)  # on the CPU, of rank 0 alone
    if not trainer.is_world_process_zero():
        return None
    policy = _read_base(start.base, torch.float32)
    policy.load_state_dict(state)
    torch.cuda.empty_cache()
    return policy.to("cuda" if on_cuda() else "cpu")


def round_to_bf16(policy: Any) -> None:
    """Round the master weights to what will be saved and served, so that probes are of the saved weights."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def save_adapter(policy: Any, out: Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json; nothing names a path, a card or a version."""
    fresh(out)
    save_file(adapter_state(policy), out / "adapter_model.safetensors", metadata={"format": "pt"})
    policy.peft_config[ADAPTER].save_pretrained(out)
    file = out / "adapter_config.json"
    config = json.loads(file.read_text())
    config |= {"base_model_name_or_path": NEUTRAL_BASE, "inference_mode": True, "revision": None}
    config.pop("peft_version", None)
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # PEFT keeps a set, whose order changes with the process
    file.write_text(json.dumps(config, indent=2, sort_keys=True))


def save_full(policy: Any, base: Path, out: Path) -> None:
    """Write bf16 safetensors; config, generation config, tokenizer and template are the start's own files."""
    fresh(out)
    policy.to(torch.bfloat16).save_pretrained(out)
    for path in out.iterdir():
        if not path.name.endswith(_WEIGHTS):
            path.unlink()
    for path in base.iterdir():
        if path.suffix in _BESIDE and not path.name.endswith(_WEIGHTS) and path.name != "index.json":
            shutil.copyfile(path, out / path.name)
    config = json.loads((out / "config.json").read_text())
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2, sort_keys=True))


def fresh(out: Path) -> None:
    """Make an empty folder."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
