"""The arithmetic on elements: compiled passes, and the steps around them."""
