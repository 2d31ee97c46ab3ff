"""Clients of /metrics and of the probes that are slow, silent or too many: they lose their connection, nobody else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from service.config import load_config
from service.metrics import RankMetrics
from service.net import http_server
from service.net.http_server import HttpServer


class Handler(BaseHTTPRequestHandler):
    """Says ok."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(http_server, "SILENCE_S", 1.0)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    server = HttpServer("127.0.0.1", 0, Handler, "test").start()
    yield server.server_port
    server.close()


def get(port: int, path: str = "/") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=3) as answer:
        return bytes(answer.read())


def threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def at_most(num_threads: int) -> bool:
    """Whether no more threads than this serve clients: a connection ends a moment before its thread does.

    The moment is shorter than SILENCE_S here, so that silence alone ends no thread meanwhile.
    """
    deadline = time.monotonic() + 0.3
    while threads() > num_threads and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads() <= num_threads


def test_silent_and_slow_clients_are_thrown_out(port: int) -> None:
    clients = [socket.create_connection(("127.0.0.1", port), timeout=3) for _ in range(4)]
    for client in clients[2:]:
        client.send(b"GET / HTTP/1.1\r\n")  # and never the rest
    assert get(port) == b"ok"
    for client in clients:
        assert client.recv(1000) == b""
        client.close()
    assert at_most(0)


def test_of_more_clients_than_connections_the_oldest_go_and_a_new_one_is_always_served(
    port: int,
) -> None:
    clients = [socket.create_connection(("127.0.0.1", port), timeout=3) for _ in range(30)]
    start = time.monotonic()
    assert get(port) == b"ok"
    for client in clients[:20]:
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1000) == b""
    assert time.monotonic() - start < 0.4, "long before they have been silent for too long"
    assert at_most(8)
    for client in clients:
        client.close()


def test_metrics_are_served_by_it() -> None:
    """And a second server on the port is refused as a setting."""
    config = load_config(env=False)
    metrics = RankMetrics(rank=0, model_name="demo", bundle=config.bundle)
    port = metrics.serve("127.0.0.1", 0)
    assert isinstance(metrics._server, HttpServer)
    assert b'megamoe_ready{model_name="demo",rank="0"}' in get(port, "/metrics")
    assert b"megamoe_ready" in get(port, "/metrics?name[]=megamoe_ready")
    metrics.close()
    with pytest.raises(urllib.error.URLError):
        get(port, "/metrics")
