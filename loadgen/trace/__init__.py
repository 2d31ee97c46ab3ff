"""Recorded sessions: values, files, the format."""
