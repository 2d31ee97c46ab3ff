"""A small HTTP server that its clients cannot use up: a bounded number of connections, none silent for long.

For metrics and probes. Owns limits and life; what is answered is the handler's business.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

log = logging.getLogger("megamoe.http")

MAX_CONNECTIONS = 64
"""At a time; for one more the oldest is closed. A scraper and some probes need a handful, and never for long."""
SILENCE_S = 10.0
"""A client that neither sends nor reads for so long loses its connection: a slow scraper must not keep a thread."""


class HttpServer(ThreadingHTTPServer):
    """Serves on threads of its own from `start` to `close`. Raises OSError when the address cannot be listened on."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler], name: str) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._name = name
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), type(handler.__name__, (handler,), {"timeout": SILENCE_S}))

    def start(self) -> HttpServer:
        threading.Thread(target=self.serve_forever, name=self._name, daemon=True).start()
        return self

    def close(self) -> None:
        """Stop listening; connections under way end by themselves."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # it went away just now
                    oldest.shutdown(socket.SHUT_RDWR)  # which wakes its thread
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is a bug of the handler."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("%s: a request failed", self._name, exc_info=error)
