"""Load models: resolve references, pair models with drafters, plan the memory, and prepare files."""
