"""Name models by the digests of their weights, and make the base model a checkpoint of the store."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.digest import digest_json
from storage.errors import DataError, MissingDependencyError, StoreError
from storage.inputs import fetch_input
from tasks.step import Context, Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from configs.run import RunConfig

VERSION = 1
PACKAGE = "package:"


@dataclass(frozen=True)
class Model:
    """Name a model: the checkpoint digest of a whole model, and that of an adapter on it or None."""

    base: str
    adapter: str | None = None

    @property
    def digest(self) -> str:
        """Give the model digest: that of the base, or the hash of (base digest, adapter digest)."""
        return self.base if self.adapter is None else digest_json({"base": self.base, "adapter": self.adapter})

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        return asdict(self)


def base_step(config: RunConfig, cache: Path) -> Step:
    """Name the base step by what the model is: its files, its package's file, or hub id and commit."""
    base = config.model.base
    if base.startswith(PACKAGE):
        file = _package_file(base.removeprefix(PACKAGE))
        found: Mapping[str, Any] = {"package": base, "sha256": fetch_input(str(file), cache).sha256}
    elif Path(base).is_dir():
        files = sorted(path for path in Path(base).iterdir() if path.is_file())
        found = {"files": {path.name: fetch_input(str(path), cache).sha256 for path in files if _wanted(path)}}
    elif config.model.revision:
        found = {"hub": base, "revision": config.model.revision}
    else:
        raise DataError(f"model.base: {base} is no folder here, no {PACKAGE}… and has no revision; correct the path")
    return Step("base", VERSION, {}, found)


def _wanted(path: Path) -> bool:
    """Keep what a checkpoint may hold; pickled weights and the trainer's leavings stay out."""
    if path.name in {"README.md", "training_args.bin"} or path.name.startswith("."):
        return False
    return path.suffix in {".safetensors", ".json", ".txt", ".model", ".jinja"}


def make_base(context: Context, step: Step, *, iteration: int) -> None:
    """Put the base model into the store, so that a resume on an empty machine finds it."""
    context.ensure(step, lambda: _make_base(context), iteration=iteration)


def _make_base(context: Context) -> dict[str, Any]:
    config = context.config.model
    folder = context.work / "base"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if config.base.startswith(PACKAGE):
        _dequantize(_package_file(config.base.removeprefix(PACKAGE)), folder)
    elif Path(config.base).is_dir():
        _link(Path(config.base), folder)
    else:
        _download(config.base, str(config.revision), folder)
    if not list(folder.glob("*.safetensors")):
        raise DataError(f"{config.base}: holds no *.safetensors; convert the weights, pickles are never loaded")
    reference = context.store.put_checkpoint(folder)
    shutil.rmtree(folder)
    return {"counts": {}, "facts": {"model": Model(reference.digest).to_json()}}


def _link(source: Path, folder: Path) -> None:
    """Gather a model's files without copying gigabytes where the file system allows it."""
    for path in source.iterdir():
        if path.is_file() and _wanted(path):
            try:
                os.link(path.resolve(), folder / path.name)
            except OSError:
                shutil.copyfile(path, folder / path.name)


def _package_file(package: str) -> Path:
    """Find the one GGUF file that a package carries, without importing the package."""
    spec = util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"model.base: the package {package} is not installed: `pip install 'starwheel[demo]'`"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise DataError(f"model.base: the package {package} carries {len(files)} GGUF files, wanted one")
    return files[0]


def _dequantize(file: Path, folder: Path) -> None:
    """Write the GGUF weights as bf16 safetensors; the quantization note is dropped, the weights no longer are."""
    try:
        metadata.version("gguf")
    except metadata.PackageNotFoundError as error:
        raise MissingDependencyError("reading GGUF weights needs gguf: `pip install 'starwheel[demo]'`") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _download(repository: str, revision: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            repository, revision=revision, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise StoreError(
            f"https://huggingface.co/{repository} at {revision}: {str(error).splitlines()[0]}; "
            "check id, revision, network and HF_TOKEN"
        ) from error
    _link(Path(snapshot), folder)
