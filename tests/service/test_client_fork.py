"""A process with clients may fork, as data loaders do: the child may not use them, and may not die of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json, os, threading, time
import service
import asyncio, collections, grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

under_way = threading.Event()

async def calls():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async def hammer(channel):
        while True:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""))
            under_way.set()
    await asyncio.gather(*(hammer(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) for _ in range(2)))

threading.Thread(target=asyncio.run, args=(calls(),), daemon=True).start()
assert under_way.wait(20)
codes = collections.Counter()
for _ in range(200):
    pid = os.fork()
    if not pid:
        os._exit(7)
    codes[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] += 1
print(json.dumps(codes), flush=True)
os._exit(0)
"""


def test_a_fork_while_calls_are_under_way_ends_as_it_wants() -> None:
    env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    command = [sys.executable, "-c", SCRIPT]
    said = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(said.stdout) == {"7": 200}
