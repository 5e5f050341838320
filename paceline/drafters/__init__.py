"""Drafters: whatever proposes tokens for the target. One file each."""
