"""What a plan or a merge amounts to, for people: explained, attributed, measured, exported."""
