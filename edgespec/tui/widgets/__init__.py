"""The parts of the chat screen."""
