"""A real S3 server over HTTP (moto's) as a process of its own, and a proxy in front of it that misbehaves."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.process.guard import guarded
from kit.harness import free_port, wait_until

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
        return True
    return False


class S3Server:
    """The server's process, which dies with this one, however that ends."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        argv = guarded([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)])
        environment = os.environ | {"S3_UPLOAD_PART_MIN_SIZE": "1024"}  # small parts, so that tests are quick
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        wait_until(lambda: answers(self.port), 30, "moto's server answers")

    def pause(self) -> None:
        """The server takes connections and does not answer."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def client(self) -> Any:
        """boto3 itself, so that what the code under test did is seen through other eyes."""
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint)


_started: list[S3Server] = []


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """The server, and credentials for it. One for all tests of this process: it ends with it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        if not _started:
            server = S3Server(folder / "moto.log")
            atexit.register(server.stop)
            server.start()
            _started.append(server)
        yield _started[0]


Fault = Callable[[bytes], bytes | None]
"""Given the head of a request: bytes to answer with instead of the server, RESET, or None to pass it on."""


def answer(status: int, code: str) -> bytes:
    """An S3 error as a server sends it."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


RESET = b""


class Proxy:
    """Stands before a server and lets faults happen; counts requests. One request a connection."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.fault: Fault = lambda head: None
        self.requests: list[str] = []
        self.lose: Fault = lambda head: None
        """The request is let through, the answer is not."""
        self.alter: Callable[[bytes, bytes], bytes] = lambda head, body: body
        """What becomes of a request's body on its way."""
        self.delay = 0.0
        """Seconds before each request is let through."""
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    proxy._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(30)
        data = b""
        while b"\r\n\r\n" not in data:
            piece = client.recv(65536)
            if not piece:
                return
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        self.requests.append(head.split(b"\r\n")[0].decode())
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        if b"expect: 100-continue" in head.lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        spoilt = self.fault(head)
        if spoilt == RESET:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return
        while len(body) < length:
            body += client.recv(1 << 20)
        if spoilt is not None:
            client.sendall(spoilt)
            return
        if self.delay:
            time.sleep(self.delay)
        lines = [
            line for line in head.split(b"\r\n") if not line.lower().startswith((b"connection:", b"expect:"))
        ]
        with socket.create_connection(("127.0.0.1", self.target), 30) as server:
            passed = self.alter(head, body)
            server.sendall(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + passed)
            answered = b"".join(iter(lambda: server.recv(1 << 20), b""))
        lost = self.lose(head)
        client.sendall(answered if lost is None else lost)


@contextlib.contextmanager
def proxy(target: int) -> Iterator[Proxy]:
    standing = Proxy(target)
    try:
        yield standing
    finally:
        standing.close()


class FirstN:
    """A fault for the first n requests that match a method and, if given, a piece of the path."""

    def __init__(self, count: int, spoilt: bytes, method: str = "", path: str = "") -> None:
        self.left = count
        self._spoilt = spoilt
        self._method = method
        self._path = path

    def __call__(self, head: bytes) -> bytes | None:
        line = head.split(b"\r\n")[0].decode()
        if self.left > 0 and line.startswith(self._method) and self._path in line:
            self.left -= 1
            return self._spoilt
        return None
