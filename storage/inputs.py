"""Fetch the files a user names (local or s3://) and say what exactly was read: size and SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import DataError, StoreError

# A file changed this recently may change again within the same clock tick of its file system: its digest is not
# remembered.
SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class InputFile:
    """Name an input on this machine: its full address, where it lies, SHA-256 (hex) and size in bytes."""

    url: str
    path: Path
    sha256: str
    bytes: int


def fetch_input(url: str, cache: Path) -> InputFile:
    """Give the local file behind a path or an s3:// address.

    A local file stays where it is and is hashed once: the digest is remembered in `cache` by path, size, mtime and
    inode. An object is fetched whole into `cache`, under its digest; while its ETag stays the same it isn't fetched
    again. Raises DataError for an address that can't be an input, StoreError for one that can't be reached.
    """
    if url.startswith("s3://"):
        return _fetch_object(url, cache)
    if "://" in url:
        raise DataError(f"{url!r} can't be read: give a local path or s3://bucket/key.")
    return _local_file(url, cache)


def _local_file(url: str, cache: Path) -> InputFile:
    path = Path(os.path.abspath(os.path.expanduser(url)))
    before = _stat(path)
    mark = f"{before.st_size} {before.st_mtime_ns} {before.st_ino}"
    memory = _Memory(cache)
    digest = memory.get(str(path), mark)
    if digest is None:
        started = time.time_ns()
        digest = _hash(path)
        after = _stat(path)
        if (after.st_size, after.st_mtime_ns, after.st_ino) != (before.st_size, before.st_mtime_ns, before.st_ino):
            raise DataError(f"{path} changed while it was read: run again when it is complete.")
        if started - before.st_mtime_ns > SETTLED_NS:
            memory.put(str(path), mark, digest)
    return InputFile(str(path), path, digest, before.st_size)


def _stat(path: Path) -> os.stat_result:
    try:
        found = os.stat(path)
    except PermissionError:
        raise DataError(
            f"{path} may not be read by this user: change its permissions or those of its folders."
        ) from None
    except (OSError, ValueError):  # ValueError: a null byte in the name
        raise DataError(f"{path} does not exist: check the path (relative ones start at {os.getcwd()}).") from None
    if stat.S_ISDIR(found.st_mode):
        raise DataError(f"{path} is a folder: name one file of pairs in it, one source a file.")
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is a pipe or device: copy its content into a file.")
    return found


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except PermissionError:
        raise DataError(f"{path} may not be read by this user: change its permissions.") from None
    except OSError as error:
        raise StoreError(f"{path} can't be read ({error.strerror}): check the disk it lies on.") from error


def _fetch_object(url: str, cache: Path) -> InputFile:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if not bucket or not key or key.endswith("/"):
        raise DataError(f"{url} names no object: give s3://bucket/key of one file of pairs.")
    memory = _Memory(cache)
    with _Sentences(url, bucket):
        files = _file_system()
        info = _info(files, url, bucket, key)
        mark = f"{info['size']} {info.get('ETag')} {info.get('LastModified')}"
        known = memory.get(url, mark)
        if known is not None and (path := cache / known).is_file() and _local_file(str(path), cache).sha256 == known:
            return InputFile(url, path, known, info["size"])
        path = _download(files, url, cache)
        again = _info(files, url, bucket, key)
    size = path.stat().st_size
    if size != info["size"] or again.get("ETag") != info.get("ETag"):
        path.unlink()
        raise StoreError(f"{url} changed while it was read, or arrived with {size} of {info['size']} bytes: run again.")
    digest = _hash(path)
    os.replace(path, cache / digest)
    memory.put(url, mark, digest)
    return InputFile(url, cache / digest, digest, size)


def _file_system() -> Any:
    import s3fs

    # An instance of our own without a listings cache: s3fs shares instances, and their stale listings, process-wide.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return s3fs.S3FileSystem(endpoint_url=endpoint, use_listings_cache=False, skip_instance_cache=True)


def _info(files: Any, url: str, bucket: str, key: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = files.info(f"{bucket}/{key}")
    except FileNotFoundError:
        try:
            files.call_s3("head_bucket", Bucket=bucket)
        except FileNotFoundError:
            raise StoreError(
                f"{url}: there is no bucket {bucket!r} at {_endpoint(files)}: check name and endpoint."
            ) from None
        raise DataError(f"{url} does not exist at {_endpoint(files)}: check the key.") from None
    if found["type"] != "file":
        raise DataError(f"{url} is a folder: name one object in it, one source an object.")
    return found


def _endpoint(files: Any) -> str:
    return str(files.endpoint_url or "AWS")


def _download(files: Any, url: str, cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix="fetch-", dir=cache)
    os.close(handle)
    try:
        files.get_file(url, name)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)


class _Sentences:
    """Turn what s3fs and botocore raise into one sentence with the full address."""

    def __init__(self, url: str, bucket: str) -> None:
        self.url, self.bucket = url, bucket

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

        if isinstance(error, DataError | StoreError) or not isinstance(error, OSError | BotoCoreError | ValueError):
            return
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            text = (
                "needs credentials and none were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            )
        elif isinstance(error, PermissionError):
            text = (
                f"may not be read: allow s3:GetObject on it and s3:ListBucket on {self.bucket!r} to these credentials"
            )
        else:
            text = f"can't be read ({error}): check address, endpoint (AWS_ENDPOINT_URL) and network"
        raise StoreError(f"{self.url} {text}.") from error


class _Memory:
    """Remember digests of inputs in a small JSON file: address -> [mark, sha256]. A lost entry costs one hashing."""

    def __init__(self, cache: Path) -> None:
        self.file = cache / "inputs.json"

    def get(self, address: str, mark: str) -> str | None:
        entry = self._load().get(address)
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == mark and isinstance(entry[1], str):
            return entry[1]
        return None

    def put(self, address: str, mark: str, digest: str) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = {**self._load(), address: [mark, digest]}
        handle, name = tempfile.mkstemp(prefix="inputs-", dir=self.file.parent)
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(content, file, indent=0, sort_keys=True)
        os.replace(name, self.file)

    def _load(self) -> dict[str, Any]:
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}
