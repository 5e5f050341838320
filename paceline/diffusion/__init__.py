"""Masked-diffusion models: many tokens a forward, committed in any order within a block."""

from paceline.diffusion.loop import Counts, Denoised, Denoiser, DiffusionModel
from paceline.diffusion.schedules import SCHEDULES, Schedule, make_schedule

__all__ = [
    "SCHEDULES", "Counts", "Denoised", "Denoiser", "DiffusionModel", "Schedule", "make_schedule",
]  # fmt: skip
