"""The words that all rooms speak: ids, errors, sizes, requests, texts for users.

Nothing else may settle here: what one room alone needs belongs to that room.
"""
