"""Acceptance rules: which drafted tokens to keep, and the target's own next one. One file each."""
