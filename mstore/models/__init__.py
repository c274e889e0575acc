"""Models of a store: their adapters, vocabularies and element types, and how far each moved."""
