"""Is the backend right on this GPU? Virtual ranks in threads on one device, or one a GPU, against the oracles.

`python -m megamoe.backends.hopper.selftest` prints a line a check and exits with 1 if one failed. Every rank is a
HopperBackend with its own stream and heap, driven by its own thread through the Backend protocol as the runtime
does; kernels of all ranks really run side by side and wait for each other.

cases: what is checked. ranks: the group. oracle, protocol, memory: the checks. run: all of them.
"""
