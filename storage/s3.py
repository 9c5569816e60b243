"""Keep the store in an S3 bucket: conditional single writes, multipart payloads read back, whole reads."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from storage import failpoint, layout
from storage.backend import NotFoundError
from storage.digest import digest_bytes
from storage.errors import CommitUnknownError, CorruptArtifactError, StoreError
from storage.s3_calls import Patience, S3Calls, TakenError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*?))?/?")
SINGLE_BYTES = 64 << 20
PART_BYTES = 32 << 20
_MAX_PARTS = 9_000
_UPLOADS = 4
_CHUNK = 1 << 20
PAGE_KEYS = 1000
_READ_BACKS = 5


class S3Backend:
    """Keep each object under its key below a prefix; credentials and endpoint come from the environment's own chain."""

    def __init__(self, url: str, *, patience: Patience | None = None) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise StoreError("that is no address of a store in S3; write s3://bucket/prefix")
        self._bucket, prefix = match.group(1), match.group(2) or ""
        self._prefix = f"{layout.key(prefix)}/" if prefix else ""
        self._calls = S3Calls(self._bucket, patience or Patience())

    @property
    def url(self) -> str:
        """The address `s3://bucket/prefix`."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"S3Backend({self.url!r})"

    def address(self, key: str) -> str:
        """Return the object's address."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def hasty(self, *, silence: float, deadline: float) -> S3Backend:
        """Connect anew with a shorter patience."""
        return S3Backend(self.url, patience=Patience(deadline=deadline, contact=deadline, silence=silence))

    def get(self, key: str) -> bytes:
        """Read the whole object; a body that ends early is read again."""

        async def send(client: Any) -> bytes:
            answer = await client.get_object(Bucket=self._bucket, Key=self._key(key))
            async with answer["Body"] as body:
                data: bytes = await body.read()
            return data

        return self._calls.repeat(send, "get_object", self.address(key))

    def get_file(self, key: str, path: Path) -> None:
        """Write the whole object to a file in chunks."""

        async def send(client: Any) -> None:
            answer = await client.get_object(Bucket=self._bucket, Key=self._key(key))
            with open(path, "wb") as file:
                async with answer["Body"] as body:
                    while chunk := await body.read(_CHUNK):
                        file.write(chunk)

        self._calls.repeat(send, "get_object", self.address(key))

    def put_new(self, key: str, data: bytes) -> bool:
        """Put with `If-None-Match: *`; on 412 the stored bytes tell whose write it was."""
        with failpoint.around("put_new", key):
            try:
                self._put(key, data, IfNoneMatch="*")
            except TakenError:
                return self._is(key, data)
            return True

    def put(self, key: str, data: bytes) -> None:
        """Put without a condition."""
        with failpoint.around("put", key):
            self._put(key, data)

    def put_file(self, key: str, path: Path, *, sha256: str, read_back: bool) -> None:
        """Upload in one request or in parts, then check; damaged bytes under the name are replaced."""
        size = path.stat().st_size
        with failpoint.around("put_file", key):
            if size > SINGLE_BYTES:
                known = self.size(key) == size
                if not known:
                    self._put_parts(key, path, size)
            else:
                known = not self._put_single(key, path, sha256)
            if read_back or known:
                self._check(key, path, sha256=sha256, size=size)
            elif (found := self.size(key)) != size:
                raise CorruptArtifactError(
                    f"{self.address(key)} holds {found} of {size} bytes after its upload; resume"
                )

    def size(self, key: str) -> int | None:
        """Ask for the object's length."""
        try:
            return int(self._calls.call("head_object", self.address(key), Key=self._key(key))["ContentLength"])
        except NotFoundError:
            return None

    def list(self, prefix: str) -> Iterator[str]:
        """Yield keys page by page."""
        for page in self._pages(prefix):
            for entry in page.get("Contents", []):
                yield entry["Key"].removeprefix(self._prefix)

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the common prefixes page by page."""
        for page in self._pages(prefix, Delimiter="/"):
            for entry in page.get("CommonPrefixes", []):
                yield entry["Prefix"].removeprefix(self._prefix + prefix).rstrip("/")

    def delete(self, key: str) -> None:
        """Delete the object."""
        with failpoint.around("delete", key):
            self._calls.call("delete_object", self.address(key), Key=self._key(key))

    def _key(self, key: str) -> str:
        return self._prefix + layout.key(key)

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        self._calls.call(
            "put_object", self.address(key), Key=self._key(key), Body=data, ContentMD5=_md5(data), **condition
        )

    def _is(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key) == data
        except NotFoundError:  # taken then, deleted since
            return False
        except CommitUnknownError:
            raise
        except StoreError as error:
            raise CommitUnknownError(
                f"{self.address(key)} is taken but can't be read, so it may be ours or not; nothing was deleted, resume"
            ) from error

    def _put_single(self, key: str, path: Path, sha256: str, *, replace: bool = False) -> bool:
        data = path.read_bytes()
        if digest_bytes(data) != sha256:
            raise CorruptArtifactError(f"{path} changed while it was stored; check the disk")
        try:
            self._put(key, data, **({} if replace else {"IfNoneMatch": "*"}))
        except TakenError:
            return False
        return True

    def _check(self, key: str, path: Path, *, sha256: str, size: int) -> None:
        """Read the stored bytes and hash them; a first mismatch may be the way's, later ones are stored again."""
        found = ""
        for tried in range(_READ_BACKS):
            found = self._stored_digest(key)
            if found == sha256:
                return
            if tried and size > SINGLE_BYTES:
                self._put_parts(key, path, size)
            elif tried:
                self._put_single(key, path, sha256, replace=True)
            time.sleep(0.05 * tried)
        raise CorruptArtifactError(f"{self.address(key)} reads back as {found} instead of {sha256}; check the endpoint")

    def _stored_digest(self, key: str) -> str:
        async def send(client: Any) -> str:
            total = hashlib.sha256()
            answer = await client.get_object(Bucket=self._bucket, Key=self._key(key))
            async with answer["Body"] as body:
                while chunk := await body.read(_CHUNK):
                    total.update(chunk)
            return total.hexdigest()

        return self._calls.repeat(send, "get_object", self.address(key))

    def _put_parts(self, key: str, path: Path, size: int) -> None:
        """Upload in parts, each with its MD5; a failed upload is aborted, so that no parts stay behind."""
        target = {"Key": self._key(key), "address": self.address(key)}
        upload = {**target, "UploadId": self._calls.call("create_multipart_upload", **target)["UploadId"]}
        length = max(PART_BYTES, -(-size // _MAX_PARTS))

        def send(index: int) -> dict[str, Any]:
            with open(path, "rb") as file:
                file.seek(index * length)
                data = file.read(length)
            answer = self._calls.call("upload_part", **upload, PartNumber=index + 1, Body=data, ContentMD5=_md5(data))
            return {"PartNumber": index + 1, "ETag": answer["ETag"]}

        try:
            with ThreadPoolExecutor(_UPLOADS) as pool:
                parts = list(pool.map(send, range(-(-size // length))))
            failpoint.hit(f"put_file {key} parts stored")
            self._complete(upload, parts, key=key, size=size)
        except BaseException:
            self._abort(upload)
            raise

    def _complete(self, upload: dict[str, Any], parts: Sequence[dict[str, Any]], *, key: str, size: int) -> None:
        try:
            self._calls.call("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
        except NotFoundError:  # an earlier try was applied and its answer lost, or upload and object are both gone
            if self.size(key) != size:
                raise

    def _abort(self, upload: dict[str, Any]) -> None:
        try:
            S3Calls(self._bucket, Patience(deadline=5.0)).call("abort_multipart_upload", **upload)
        except StoreError:  # what stays is garbage for the collector; the first error is the one to show
            return

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        request: dict[str, Any] = {"Prefix": self._prefix + prefix, "MaxKeys": PAGE_KEYS, **options}
        while True:
            page = self._calls.call("list_objects_v2", self.address(prefix), **request)
            yield page
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
