"""From a request to a plan: what is there, what it is worth, what is read, what is cut."""
