"""Who starts a service, watches it and cleans up after it."""
