"""Find, plan and load models, and assemble them and their drafters into a Runtime."""
