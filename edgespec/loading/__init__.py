"""Load models: resolve references, pair targets with drafters, plan memory use, and prepare files."""
