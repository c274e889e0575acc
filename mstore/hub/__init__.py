"""The Hugging Face Hub: where many checkpoints are.  Needs huggingface_hub, the extra `hub`."""
