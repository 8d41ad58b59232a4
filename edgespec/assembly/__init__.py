"""Find, plan and load models, and assemble them with their drafters into a Runtime."""
