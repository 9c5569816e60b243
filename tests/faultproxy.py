"""Stand between a client and an S3 server and break things on request: seeded, counted, one thread a connection."""

from __future__ import annotations

import http.client
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Action(StrEnum):
    """Say what happens to a request; from APPLY_THEN_REFUSE on, the server behind has applied it."""

    REFUSE = "refused before it is applied"
    RESET_BEFORE = "connection reset before it is applied"
    CUT_REQUEST = "upload cut in the middle"
    FLIP_REQUEST = "bit flipped in the upload"
    FLIP_UNCHECKED = "bit flipped in the upload, its checksum taken away"
    DELAY = "delayed"
    DUPLICATE = "sent twice"
    APPLY_THEN_REFUSE = "applied, then answered with an error"
    RESET_AFTER = "applied, then the connection reset"
    RESET_MIDWAY = "connection reset in the middle of the answer"
    CUT_SHORT = "answer ends early, its length is told as whole"
    CUT_TOLD = "answer ends early, its length is told as cut"
    FLIP_ANSWER = "bit flipped in the answer"
    STALL = "answer stops after the headers"


@dataclass(frozen=True)
class Fault:
    """Choose requests by method and a pattern in path and query: after `skip`, at most `times`, by `chance`."""

    action: Action
    method: str = "GET|PUT|POST|HEAD|DELETE"
    path: str = ""
    chance: float = 1.0
    times: int | None = None
    skip: int = 0
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.02


class FaultProxy(ThreadingHTTPServer):
    """Forward to a port of 127.0.0.1; `fired` counts the actions taken since `set`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: int, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.seed = upstream, seed
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.resets: set[Any] = set()
        self._lock = threading.Lock()
        self.set()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def set(self, *faults: Fault) -> None:
        """Replace the faults and start counting and drawing anew."""
        with self._lock:
            self.faults, self.seen, self.fired = faults, Counter[Fault](), Counter[Fault]()
            self.random = random.Random(self.seed)

    def pick(self, method: str, path: str) -> Fault | None:
        """Choose the fault for a request, if any."""
        with self._lock:
            for fault in self.faults:
                if method not in fault.method.split("|") or not re.search(fault.path, path):
                    continue
                self.seen[fault] += 1
                spent = fault.times is not None and self.fired[fault] >= fault.times
                if self.seen[fault] > fault.skip and not spent and self.random.random() < fault.chance:
                    self.fired[fault] += 1
                    return fault
        return None

    def flip(self, data: bytes) -> bytes:
        """Change one bit."""
        if not data:
            return data
        with self._lock:
            place, bit = self.random.randrange(len(data)), self.random.randrange(8)
        return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]

    def shutdown_request(self, request: Any) -> None:
        """Close; a connection to be reset must not say goodbye first."""
        if request in self.resets:
            self.resets.discard(request)
            request.close()
        else:
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet about clients that hang up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultProxy

    def relay(self) -> None:
        fault = self.server.pick(self.command, self.path)
        action = fault.action if fault else None
        length = int(self.headers.get("Content-Length") or 0)
        if action is Action.RESET_BEFORE:
            return self._reset()
        if action is Action.CUT_REQUEST:
            self.rfile.read(length // 2)
            return self._reset()
        body = self.rfile.read(length)
        if fault and action is Action.DELAY:
            time.sleep(fault.seconds)
        if fault and action is Action.REFUSE:
            return self._refuse(fault)
        if action is Action.FLIP_UNCHECKED:
            del self.headers["Content-MD5"]
        flipped = action in {Action.FLIP_REQUEST, Action.FLIP_UNCHECKED}
        answer = self._forward(self.server.flip(body) if flipped else body)
        if action is Action.DUPLICATE:
            answer = self._forward(body)
        if fault and action is Action.APPLY_THEN_REFUSE:
            return self._refuse(fault)
        if action is Action.RESET_AFTER:
            return self._reset()
        return self._answer(*answer, fault=fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = relay

    def log_message(self, *_: Any) -> None:
        pass

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        passed = {name: value for name, value in self.headers.items() if name.lower() not in {"expect", "connection"}}
        upstream.request(self.command, self.path, body or None, passed)
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        dropped = {"connection", "transfer-encoding"} | ({"content-length"} if self.command != "HEAD" else set())
        return (
            answer.status,
            [(name, value) for name, value in answer.getheaders() if name.lower() not in dropped],
            data,
        )

    def _refuse(self, fault: Fault) -> None:
        xml = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
        self._answer(fault.status, [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else xml)

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, *, fault: Fault | None = None) -> None:
        action = fault.action if fault else None
        sent = self.server.flip(data) if action is Action.FLIP_ANSWER else data
        if action in {Action.RESET_MIDWAY, Action.CUT_SHORT, Action.CUT_TOLD}:
            sent = data[: len(data) // 2]
        told = len(sent) if action is Action.CUT_TOLD else len(data)
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}", *(f"{n}: {v}" for n, v in headers)]
        if status not in {204, 304} and (
            self.command != "HEAD" or not any(n.lower() == "content-length" for n, _ in headers)
        ):
            lines.append(f"Content-Length: {told}")
        self.wfile.write("\r\n".join([*lines, "", ""]).encode())
        if fault and action is Action.STALL:
            time.sleep(fault.seconds)
        self.wfile.write(b"" if self.command == "HEAD" else sent)
        if action is Action.RESET_MIDWAY:
            self._reset()
        self.close_connection = self.close_connection or action in {Action.CUT_SHORT, Action.STALL}

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.server.resets.add(self.connection)
        self.close_connection = True
