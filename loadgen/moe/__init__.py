"""The expert layers as the attention tier sees them: a live service, or a table of latencies."""
