"""The controller of `--method auto`: measured costs, acceptance statistics and the loss limit."""
