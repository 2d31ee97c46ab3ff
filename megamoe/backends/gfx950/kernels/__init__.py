"""FlyDSL kernels, one file a stage; `build` compiles them. Kernel language: read by the compiler, not run as Python."""
