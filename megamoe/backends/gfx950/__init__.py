"""The gfx950 (MI355X) backend: FlyDSL kernels, a symmetric heap, and an emulated device that proves them."""
