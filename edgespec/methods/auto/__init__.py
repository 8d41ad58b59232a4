"""The automatic mode, which drafts only while that saves time, and within `--max-loss`.

Its constants were chosen rather than measured individually. `scripts/simulate_policy.py` shows their combined
effect for several machines and acceptance rates (docs/policy.md). Costs are in *target steps*, the duration
of a single-token target pass, so that they do not depend on the speed of a machine.
"""
