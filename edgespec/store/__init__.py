"""Models on this machine and on Hugging Face, and data saved between runs."""
