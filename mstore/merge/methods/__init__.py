"""The merge methods, one file each: what each selects and combines, and its parameters."""
