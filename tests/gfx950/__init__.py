"""Tests of the gfx950 backend and its emulated device."""
