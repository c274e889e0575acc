"""What keeps a store in order: reachability, garbage collection, checks, repair, backups, pins."""
