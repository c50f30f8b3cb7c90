"""Lies between clients and the S3 server in tests: counts requests, and drops, fails, delays or swallows chosen ones."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Verdict = Literal["pass", "drop", "drop answer", "cut answer", "fail", "silent"]
"""Pass a request on; close the connection before it, instead of answering it, or in mid answer; answer 503; never answer."""
_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_HOP = frozenset({"connection", "expect", "transfer-encoding", "content-length", "keep-alive"})


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a client."""

    method: str
    path: str
    nbytes: int

    @property
    def writes(self) -> bool:
        return self.method not in ("GET", "HEAD")


class Proxy:
    """`url` leads to the server behind it. Verdicts come from `judge`, which runs on the thread of the connection."""

    def __init__(self, upstream: str) -> None:
        self.requests: list[Request] = []
        self.judge: Callable[[Request], Verdict] = lambda request: "pass"
        self.answered: Callable[[Request], None] = lambda request: None
        """Called when the server has carried out a request, before its client knows."""
        self.released = threading.Event()
        """Set when those who wait for an answer that never comes may go."""
        self.upstream = upstream.removeprefix("http://")
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def judging(self, judge: Callable[[Request], Verdict]) -> Iterator[None]:
        """Let `judge` decide for a while."""
        before, self.judge = self.judge, judge
        try:
            yield
        finally:
            self.judge = before
            self.released.set()
            self.released = threading.Event()

    @contextmanager
    def counting(self) -> Iterator[list[Request]]:
        """The requests that come meanwhile."""
        with self._lock:
            self.requests = found = list[Request]()
        yield found


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed leave broken connections: no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server
    _upstream: http.client.HTTPConnection | None = None

    def _handle(self) -> None:
        body = self._body()
        if body is None:
            return
        proxy = self.server.proxy
        request = Request(self.command, self.path, len(body))
        proxy.note(request)
        verdict, released = proxy.judge(request), proxy.released
        if verdict == "silent":
            released.wait()
        if verdict in ("silent", "drop"):
            self.close_connection = True
            return
        status, headers, answer = (503, [], _BUSY) if verdict == "fail" else self._ask(body)
        proxy.answered(request)
        if verdict == "drop answer":
            self.close_connection = True
            return
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        length = dict(headers).get("Content-Length", "0") if self.command == "HEAD" else len(answer)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if verdict == "cut answer":
            self.wfile.write(answer[: len(answer) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815  # the names that http.server asks for

    def _body(self) -> bytes | None:
        """The body; None when the client went away while it was on its way."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass  # trailers
            return b"".join(parts)
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        return body if len(body) == length else None

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's answer. Its connection lives as long as the client's."""
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection(self.server.proxy.upstream, timeout=120)
        upstream = self._upstream
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP:
                upstream.putheader(name, value)  # with the host that was signed
        upstream.putheader("Content-Length", str(len(body)))
        upstream.endheaders(body)
        answer = upstream.getresponse()
        return answer.status, answer.getheaders(), answer.read()

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        super().finish()

    def handle_expect_100(self) -> bool:
        goes_on = super().handle_expect_100()
        self.wfile.flush()  # the client waits for it
        return goes_on

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing is logged."""
