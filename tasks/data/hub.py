"""Load a data set of the Hugging Face hub at a commit, through `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from storage.errors import DataError, MissingDependencyError, StoreError
from tasks.data.text_rows import one_line

if TYPE_CHECKING:
    import pyarrow as pa

HUB = "https://huggingface.co/datasets/"


def address(name: str) -> str:
    """Give the web address of a data set, for messages; a local folder is its own."""
    return name if Path(name).is_dir() else HUB + name


def load(name: str, *, revision: str | None, config: str | None = None, split: str | None = None) -> pa.Table:
    """Give the rows of one split; it is downloaded once and kept in the cache of `datasets`.

    name: `owner/name`, or a local folder laid out like a data set of the hub. config and split may be left out where
    there is one. No code of a data set is run. Raises DataError for a name, config or split that isn't there,
    StoreError where the hub can't be reached.
    """
    try:
        import datasets
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise MissingDependencyError(f"{address(name)} needs datasets: `pip install datasets`") from error
    where = f"{address(name)} at {revision or 'no commit'}"
    datasets.disable_progress_bars()
    # Where the hub can't be reached `datasets` takes the latest copy in its cache, of any commit: one cache a commit.
    cache = Path(datasets.config.HF_DATASETS_CACHE, "at", revision or "local", quote(config or "-", safe=""))
    try:
        found = datasets.load_dataset(name, config, split=split, revision=revision, cache_dir=str(cache))
    except (datasets.exceptions.DatasetNotFoundError, datasets.exceptions.DataFilesNotFoundError) as error:
        raise DataError(f"{where}: {one_line(error)}; check id and commit, and HF_TOKEN if it is private.") from error
    except (HfHubHTTPError, ConnectionError, TimeoutError) as error:
        raise StoreError(f"{where} can't be reached ({one_line(error)}): check network and HF_TOKEN.") from error
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{where} can't be loaded ({one_line(error)}): check config and split.") from error
    return _one_split(found, where)


def _one_split(found: Any, where: str) -> pa.Table:
    if isinstance(found, dict):
        if len(found) != 1:
            raise DataError(f"{where} has the splits {', '.join(found)}: name one by `split`.")
        (found,) = found.values()
    table: pa.Table = found.with_format("arrow")[:]
    return table
