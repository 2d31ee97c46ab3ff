"""Load generation end to end: agent sessions in, MoE steps out, one report."""
