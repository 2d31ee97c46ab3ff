"""The public client, async and blocking. Ten lines are enough:

    async with AsyncMoeGroup.connect("127.0.0.1:50051", holder="my-tier") as moe:
        async with moe.step([4] * moe.info.num_ranks, phase="decode") as step:
            for layer_idx in range(moe.info.num_layers):
                outs = await step.layer(layer_idx, batches)

`MoeGroup` is the blocking twin (without async and await). `forward_step` is one unary call without a lease. Errors are
the classes of megamoe.errors; those that came from the service are also `RemoteError` and carry its gRPC status.
"""

from service.client.blocking import Front, MoeGroup
from service.client.errors import RemoteError
from service.client.front import AsyncFront, forward_step
from service.client.group import AsyncMoeGroup, AsyncStep
from service.client.info import Limits, ServiceInfo
from service.client.values import GroupOutput, Rows

__all__ = [
    "AsyncFront",
    "AsyncMoeGroup",
    "AsyncStep",
    "Front",
    "GroupOutput",
    "Limits",
    "MoeGroup",
    "RemoteError",
    "Rows",
    "ServiceInfo",
    "forward_step",
]
