"""Where checkpoints come from that are in no directory: the Hugging Face Hub."""
