"""Generated stubs of proto/megamoe/v1; `make proto` writes them. Never edit them by hand."""
