"""The public client, async and blocking. Ten lines are enough:

    async with AsyncMoeGroup.connect("127.0.0.1:50051", holder="my-tier") as moe:
        async with moe.step([4] * moe.info.num_ranks, phase="decode") as step:
            for layer_idx in range(moe.info.num_layers):
                outs = await step.layer(layer_idx, batches)

`MoeGroup` is the blocking twin (without async and await). `MoeRank` is one rank of it for a process of its own, through
shared memory where it is on the rank's host. `forward_step` is one unary call without a lease. Errors are the classes
of megamoe.errors; those that came from the service are also `RemoteError` and carry its gRPC status.
"""

from service.client.blocking import Front, MoeGroup
from service.client.errors import RemoteError
from service.client.front import AsyncFront, forward_step
from service.client.group import AsyncMoeGroup, AsyncStep
from service.client.info import Limits, ServiceInfo
from service.client.rank import MoeRank
from service.client.rank_step import RankOutput, RankStep, StartedLayer
from service.client.values import GroupOutput, Rows

__all__ = [
    "AsyncFront",
    "AsyncMoeGroup",
    "AsyncStep",
    "Front",
    "GroupOutput",
    "Limits",
    "MoeGroup",
    "MoeRank",
    "RankOutput",
    "RankStep",
    "RemoteError",
    "Rows",
    "ServiceInfo",
    "StartedLayer",
    "forward_step",
]
