"""One module per command, named after its verb; each defines the `Command` of that name."""
