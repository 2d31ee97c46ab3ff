"""Keepalive pings far faster than gRPC servers like: ours answers them all, and a strict one shows that it could not.

A gRPC client limits its own pings, so this one speaks HTTP/2 frames itself (RFC 9113, sections 3.4, 6.5, 6.7, 6.8).
"""

from __future__ import annotations

import asyncio
import contextlib
import struct

import grpc

from tests.service.served_rank import ServedRank

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # an empty SETTINGS frame
PING, GOAWAY = 6, 7
NUM_PINGS = 30


async def ping(address: str) -> tuple[int, list[bytes]]:
    """(pings that were answered, reasons of GOAWAY frames) of 30 pings, 50 a second, on a connection without calls."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answered, reasons = 0, []

    async def read() -> None:
        nonlocal answered
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readexactly(9)
                body = await reader.readexactly(int.from_bytes(head[:3], "big"))
                answered += head[3] == PING and head[4] & 1
                if head[3] == GOAWAY:
                    reasons.append(body[8:])

    reading = asyncio.create_task(read())
    writer.write(PREFACE)
    with contextlib.suppress(ConnectionError):
        for number in range(NUM_PINGS):
            writer.write(struct.pack(">I", 8)[1:] + struct.pack(">BBIQ", PING, 0, 0, number))
            await writer.drain()
            await asyncio.sleep(0.02)
    for _ in range(100):
        if answered == NUM_PINGS or reasons:
            break
        await asyncio.sleep(0.02)
    reading.cancel()
    writer.close()
    return answered, reasons


async def test_pings_as_fast_as_a_client_likes(served: ServedRank) -> None:
    assert await ping(served.address) == (NUM_PINGS, [])


async def test_a_strict_server_sends_such_a_client_away() -> None:
    """Else the test above would prove nothing."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    answered, reasons = await ping(f"127.0.0.1:{port}")
    await server.stop(None)
    assert answered < NUM_PINGS
    assert reasons == [b"too_many_pings"]
