"""One module a command, named like its verb, holding one `Verb` of that name."""
