"""The merge methods, a file each: what each selects and combines, and which parameters it takes."""
