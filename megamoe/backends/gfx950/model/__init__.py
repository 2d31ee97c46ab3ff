"""What a sub-step should take on an MI355X, computed from what the emulator counts: a model, not a measurement.

machine.py the device; counts.py instructions of one tile (measured on the emulator, kept in counts.json); work.py rows
and bytes of a step; predict.py the time; published.py what others' kernels take; tables.py what `python -m` writes.
"""
