"""Snapshots go to places where others find models: the Hugging Face Hub."""
