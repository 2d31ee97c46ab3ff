"""The shared-memory request ring: the one way into a rank's step loop."""
