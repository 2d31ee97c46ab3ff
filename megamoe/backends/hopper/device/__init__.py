"""Kernels: Triton for what moves rows, Gluon for the GEMMs. One file a stage; references.py has their twins in torch.

Only kernels.py imports these files, and only where a GPU runs them.
"""
