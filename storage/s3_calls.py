"""Call S3 through the client inside s3fs, with one retry policy of our own that judges by HTTP status.

The libraries' retries are off: a retried conditional write meets its own first try as 412 and would report a lost race
that was won. Here the same bytes are sent again until there is a clear answer or the deadline passes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import s3fs
from botocore import exceptions as botocore_errors
from botocore.parsers import ResponseParserError
from fsspec import asyn

from storage.backend import NotFoundError
from storage.errors import CommitUnknownError, StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# Refused bytes that were damaged or cut on the way; AWS, Ceph and the emulators each have words of their own for it.
_DAMAGED = {
    "BadDigest",
    "InvalidDigest",
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
    "IncompleteBody",
    "RequestTimeout",
}
_STALE = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_READS = {"get_object", "head_object", "list_objects_v2"}
_REJECTED = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidClientTokenId", "InvalidToken"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """Bound how long a call is tried again, in seconds.

    `contact` holds until the endpoint has answered once: a wrong address should not take minutes to be told.
    `silence` bounds one request in which no byte arrives.
    """

    deadline: float = 300.0
    contact: float = 15.0
    first_pause: float = 0.1
    longest_pause: float = 10.0
    silence: float = 60.0


class TakenError(Exception):
    """Tell that a conditional write met an object (412); whose it is must be read."""


class S3Calls:
    """Send requests about one bucket; safe for threads and, by connecting anew, after a fork."""

    def __init__(self, bucket: str, patience: Patience) -> None:
        self._bucket = bucket
        self._patience = patience
        self._lock = threading.Lock()
        self._files: Any = None
        self._inherited: Any = None
        self._pid = -1
        self._reached = False

    def call(self, operation: str, address: str, **request: Any) -> dict[str, Any]:
        """Send a request that can be repeated and return the answer; raises NotFoundError, TakenError or StoreError."""

        async def send(client: Any) -> dict[str, Any]:
            answer: dict[str, Any] = await getattr(client, operation)(Bucket=self._bucket, **request)
            return answer

        return self.repeat(send, operation, address)

    def repeat(self, send: Callable[[Any], Awaitable[T]], operation: str, address: str) -> T:
        """Await `send(client)` until it succeeds or is refused; a write without an answer raises CommitUnknownError."""
        start, pause, renewed = time.monotonic(), self._patience.first_pause, False
        while True:
            try:
                answer = self._once(send)
            except Exception as error:
                reason = _judge(error, operation, address, self._endpoint())
                if reason in _STALE and not renewed:
                    self._files, renewed = None, True
                elif reason in _STALE:
                    raise StoreError(f"the credentials for {address} have expired; renew them and resume") from None
                left = start + self._limit() - time.monotonic() - pause
                if left < 0:
                    raise self._gave_up(operation, address, reason) from None
            else:
                self._reached = True
                return answer
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, self._patience.longest_pause)

    def _once(self, send: Callable[[Any], Awaitable[T]]) -> T:
        files = self._connection()

        async def run() -> T:
            return await send(await files.set_session())

        result: T = asyn.sync(files.loop, run)
        return result

    def _connection(self) -> Any:
        with self._lock:
            if self._pid != os.getpid():
                self._inherited = self._files  # kept: its finalizer would wait for the parent's event loop
                self._files, self._pid = None, os.getpid()
            if self._files is None:
                self._files = s3fs.S3FileSystem(
                    anon=False,
                    use_listings_cache=False,
                    skip_instance_cache=True,
                    config_kwargs={
                        "retries": {"total_max_attempts": 1, "mode": "standard"},
                        "connect_timeout": min(10.0, self._patience.silence),
                        "read_timeout": self._patience.silence,
                        "max_pool_connections": 64,
                        # Ceph 16 knows no trailing checksums; we send Content-MD5 and check our own SHA-256 on every
                        # read.
                        "request_checksum_calculation": "when_required",
                        "response_checksum_validation": "when_required",
                    },
                )
            return self._files

    def _limit(self) -> float:
        return self._patience.deadline if self._reached else min(self._patience.contact, self._patience.deadline)

    def _endpoint(self) -> str:
        url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        parts = urlsplit(url)
        return f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname or "AWS"

    def _gave_up(self, operation: str, address: str, reason: str) -> StoreError:
        if not self._reached:
            return StoreError(
                f"can't reach {address} at {self._endpoint()} ({reason}); check AWS_ENDPOINT_URL and the network"
            )
        if operation not in _READS:
            return CommitUnknownError(
                f"no clear answer about the write of {address} within {self._limit():.0f} s ({reason}): it may be "
                "stored "
                "or not, nothing was deleted; resume when the store answers"
            )
        return StoreError(f"{address} can't be read: no answer within {self._limit():.0f} s ({reason}); resume later")


def _judge(error: Exception, operation: str, address: str, endpoint: str) -> str:
    """Return why a request is worth repeating; raise what is final. Nothing of the error's own text is passed on."""
    if isinstance(error, StoreError | TakenError):
        raise error
    if isinstance(error, botocore_errors.ClientError):
        return _judge_answer(error.response, operation, address, endpoint)
    if isinstance(error, botocore_errors.NoCredentialsError | botocore_errors.PartialCredentialsError):
        raise StoreError(
            f"there are no credentials for {address}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE"
        ) from None
    lost = (
        botocore_errors.HTTPClientError,
        botocore_errors.ConnectionError,
        ResponseParserError,
        botocore_errors.IncompleteReadError,
    )
    if isinstance(error, botocore_errors.BotoCoreError) and not isinstance(error, lost):
        raise StoreError(
            f"{operation} of {address} can't be sent ({type(error).__name__}); check the AWS_* settings"
        ) from None
    return type(error).__name__


def _judge_answer(response: dict[str, Any], operation: str, address: str, endpoint: str) -> str:
    code = str(response.get("Error", {}).get("Code", ""))
    meta = response.get("ResponseMetadata", {})
    status = int(meta.get("HTTPStatusCode", 0))
    if code in _STALE:
        return code
    if status == 412:
        raise TakenError
    if status in {200, 408, 409, 429} or status >= 500 or (status == 400 and code in _DAMAGED):
        return f"{status} {code}"
    raise _final(status, code, f"{operation} of {address}", meta, address=address, endpoint=endpoint) from None


def _final(status: int, code: str, what: str, meta: dict[str, Any], *, address: str, endpoint: str) -> StoreError:
    """Say what a refusal means and what to do about it."""
    if code == "NoSuchBucket":
        return StoreError(f"the bucket of {address} doesn't exist at {endpoint}; make it or check the address")
    if status == 404:
        return NotFoundError(f"{address} doesn't exist")
    if code == "RequestTimeTooSkewed":
        date = meta.get("HTTPHeaders", {}).get("date")
        off = f"{(datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds():+.0f} s" if date else "too much"
        return StoreError(
            f"this machine's clock is off by {off} against {endpoint}, which refuses {address}; set the clock"
        )
    if code in _REJECTED or status == 401:
        return StoreError(
            f"{endpoint} doesn't accept the credentials for {address} ({code}); check AWS_ACCESS_KEY_ID and the secret"
        )
    if status == 403:
        return StoreError(
            f"{endpoint} refuses {what} ({code}); allow these credentials to get, put, list and delete there"
        )
    if status in {301, 307} or code == "AuthorizationHeaderMalformed":
        return StoreError(f"the bucket of {address} lies in another region; set AWS_DEFAULT_REGION to it")
    return StoreError(f"{endpoint} refuses {what} ({status} {code}); check that it speaks S3 with conditional writes")
