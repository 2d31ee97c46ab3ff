"""The one address of a service."""
