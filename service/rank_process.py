"""What every rank process runs, whoever started it: runtime, weights, warm-up, step loop, gRPC, metrics.

Owns: the order of these at start and stop. One thread owns the device (it opens the runtime, binds, warms up and then
is the step loop); one thread runs the event loop of the gRPC server. `python -m service.rank_process` is the process of
the local launcher: it is told by lines of JSON on standard input and stops when that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from typing import Any

from megamoe import PathPolicy, Runtime, random_layer_weights, unlink_all
from megamoe.errors import InternalError, MegaMoeError, PeerTimeoutError
from service import warmup
from service.agreement import Board
from service.config import threads_per_rank
from service.grpc_server import LAYER_SERVICE, Health, listen, make_server
from service.info import Addresses, State, service_info
from service.launcher import RankSpec, RankUp, up_to_json
from service.metrics import Balance, RankMetrics
from service.rank_server import RankServicer
from service.ring import RingProducer
from service.ring_async import AsyncRing
from service.step_loop import StepLoop

log = logging.getLogger("megamoe.rank")

SERVICER_RING, FRONT_RING = 0, 1
_HEALTH_PERIOD_S = 0.25
_EXIT_GRACE_S = 10.0
