"""Developer tools of this checkout; nothing here is installed."""
