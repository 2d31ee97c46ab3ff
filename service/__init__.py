"""The microservice round the runtime library (see CONTRIBUTING.md for the map)."""
