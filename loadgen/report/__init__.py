"""What a run comes to: figures, the report on disk, reading and comparing reports."""
