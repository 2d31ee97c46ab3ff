"""megamoe: the runtime library of the expert layers (the door; see CONTRIBUTING.md for the map)."""
