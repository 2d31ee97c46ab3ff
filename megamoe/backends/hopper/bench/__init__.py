"""Timing: the whole layer over all ranks of a group in this process, and the expert GEMMs alone.

`python -m megamoe.backends.hopper.bench --ranks 1` prints one line a size with the floor and the fraction of it that is
reached, the baselines beside it, and writes JSON and a plot where asked. Each rank has an EP8 rank's experts and, at T
tokens a rank, receives as many routed rows as in EP8. --ranks 1 leaves out only NVLink; --ranks 2 on two GPUs has it;
--ranks 8 on one GPU tests the protocol under load, all ranks sharing the GPU. Everything is a captured graph.

group: ranks, weights, launches. layer, gemms: what is timed. timing: one size. run: all of them; report, plot: what
is kept of a run.
"""
