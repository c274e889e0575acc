"""One module per command, named after its verb; each contains one `Verb` of that name."""
