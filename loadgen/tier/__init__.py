"""The simulated attention tier: schedulers, router, prefix caches, speculation, attention time."""
