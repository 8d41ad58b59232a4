"""The controller behind `--method auto`: measured costs, acceptance statistics and the loss limit."""
