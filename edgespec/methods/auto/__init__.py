"""Decide when and how to draft for `--method auto`, from measured costs and acceptance rates."""
