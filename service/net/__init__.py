"""The wire contract as values, and what every server has."""
