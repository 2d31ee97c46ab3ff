"""The microservice round the runtime library (see CONTRIBUTING.md for the map)."""

import os

# gRPC reads this when it is first imported. With its fork handlers, every seventh child of a process whose calls were
# under way died of a signal (grpcio 1.84, 3,500 forks); without them none of 5,109 did. Clients refuse forks anyway.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
