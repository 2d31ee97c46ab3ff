"""One self-contained HTML page from one report or several: no script, no network, light and dark."""
