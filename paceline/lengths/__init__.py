"""Length controllers: how much to draft in a round. One file each."""
