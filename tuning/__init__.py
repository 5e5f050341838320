"""The search over methods and their knobs (Ray Tune)."""
