"""Runs of public sources, simulated and held against what they published."""
