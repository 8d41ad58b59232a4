"""Chat for hours under bad conditions. `scripts/soak --help` describes the use."""
