"""The knobs of requests where a masked-diffusion model writes (`engine: diffusion`).

Nothing drafts there: each method is a schedule of the denoise loop (:mod:`paceline.diffusion`).
"""

from __future__ import annotations

from paceline.drafters.base import DrafterPart
from paceline.knobs import Knob

SCHEDULE_KNOBS = Knob[tuple[str, ...] | None](
    "schedule_knobs", tuple[str, ...], None,
    "Knobs of a schedule of the denoise loop (docs/diffusion.md), each as KNOB=VALUE; default: the "
    "schedule's own.",
    max_length=16,
)  # fmt: skip
SUB_BLOCK_CACHE = Knob[bool](
    "sub_block_cache", bool, False,
    "The denoise loop computes only the sub-block in work: cheaper, and another text.",
)  # fmt: skip

DENOISING = DrafterPart(knobs=(SCHEDULE_KNOBS, SUB_BLOCK_CACHE))
