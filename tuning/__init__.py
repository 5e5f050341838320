"""Search over methods and their knobs, with Ray Tune."""
