"""Tree shapes: which nodes an expanding drafter expands. One file each."""
