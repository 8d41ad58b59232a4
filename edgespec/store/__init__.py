"""Models on this machine and on Hugging Face, and data that is saved between runs."""
