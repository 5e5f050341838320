"""Models that write one text together, outside the decode loop of draft-then-verify.

The text is not that of one of the models, so nothing here is lossless but :mod:`oracle
<paceline.together.oracle>`, which measures. docs/together.md has an example of each.
"""
