"""What the backend is compared with: the layer from others' parts, NCCL all-to-all round somebody's experts.

`python -m megamoe.backends.hopper.baseline --ranks 2` prints a line a size, one process and GPU a rank; --ranks 1 has
no exchange. `grouped_mm`: torch's, on weights dequantized to bf16 once, which reads 3.8 times the bytes. `mxfp4`:
OpenAI's triton_kernels, with --triton-kernels. Neither quantizes activations, so both round less. To their advantage,
everything that follows from routing alone (orders, counts, splits, tile tables) is ready before the clock starts, and
counts are known on the host. Captured graphs, median of the slowest rank.
"""
