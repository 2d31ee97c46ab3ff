"""Where sessions come from when nobody recorded any, and what a corpus of them looks like."""
