"""One rank: its process, its server, its step loop."""
