"""What is known of whole tensors before they are merged: measured, and estimated from it."""
