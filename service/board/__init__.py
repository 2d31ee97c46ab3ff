"""The board on which ranks meet: intents, the order of layer calls, the lease."""
