"""One step through the expert layers, and the records of a run."""
