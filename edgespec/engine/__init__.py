"""The algorithm: pure Python and numpy. It knows no backend and no screen."""
