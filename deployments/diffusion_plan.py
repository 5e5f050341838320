"""How an engine with a masked-diffusion model runs a method: as a schedule of its denoise loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config import SpeculationConfig
from paceline.drafters.denoising import SCHEDULE_KNOBS, SUB_BLOCK_CACHE
from paceline.errors import InvalidArgument
from paceline.knobs import Knobs
from paceline.methods import DIFFUSION_METHODS
from paceline.plan import Plan, resolve

if TYPE_CHECKING:  # it loads torch, which a gateway does without
    from paceline.diffusion.schedules import Schedule

DEFAULT_SCHEDULE = "static"
"""On a CPU it writes its text faster than ``freedave`` does, which evaluates more states."""
_READ = {"method", "allow_lossy", SCHEDULE_KNOBS.name, SUB_BLOCK_CACHE.name}


def with_schedule(config: SpeculationConfig, default: str) -> SpeculationConfig:
    """The configuration with the default schedule, if it names no method or ``auto``."""
    if "method" in config.model_fields_set and config.method != "auto":
        return config
    return config.model_copy(update={"method": default})


def denoise_plan(config: SpeculationConfig) -> Plan:
    """The plan of a configuration, without its schedule: see :func:`schedule_of`.

    Raises:
        InvalidArgument: the method is no schedule; it leaves the text of ``static``, which
            ``allow_lossy`` does not permit; a knob that the denoise loop does not read.
    """
    plan = resolve(config.model_copy(update={"allow_lossy": True}), DIFFUSION_METHODS)
    for name, value in config.overrides().items():
        if name not in _READ:
            allowed = f"none with engine diffusion, which reads {', '.join(sorted(_READ))}"
            raise InvalidArgument(name, value, allowed)
    if not config.allow_lossy and not plan.method.lossless:
        same = ", ".join(sorted(m.name for m in DIFFUSION_METHODS.values() if m.lossless))
        allowed = f"one that writes the text of static ({same}), or allow_lossy: true"
        raise InvalidArgument("method", config.method, allowed)
    if not config.allow_lossy and config[SUB_BLOCK_CACHE]:
        raise InvalidArgument(
            SUB_BLOCK_CACHE.name, True, "false, or allow_lossy: true: the text is another with it"
        )
    return plan


def schedule_of(config: Knobs, own: Knobs | None = None) -> Schedule:
    """The schedule that a plan's configuration names, with its knobs.

    Args:
        own: the deployment's configuration. A request may name the files that this one names, and
            no others: they are the server's. None: any file.

    Raises:
        InvalidArgument: a knob that the schedule does not have, or a wrong value; a file; a cache
            of sub-blocks for a schedule that reads more.
    """
    from paceline.diffusion.schedules import check_sub_block_cache, make_schedule, read_knobs

    settings = config[SCHEDULE_KNOBS]
    knobs = read_knobs(settings or (), SCHEDULE_KNOBS.name)
    try:
        schedule = make_schedule(config.method, **knobs)
    except InvalidArgument as error:
        field = f"{SCHEDULE_KNOBS.name}.{error.field}"
        raise InvalidArgument(field, error.value, error.allowed) from None
    if config[SUB_BLOCK_CACHE]:
        check_sub_block_cache(schedule)
    if own is None:
        return schedule
    trusted = schedule_of(own)
    for knob, others in schedule.paths.items():
        allowed = tuple(dict.fromkeys((getattr(trusted, knob, others[0]), *others)))
        if getattr(schedule, knob) not in allowed:
            raise InvalidArgument(
                f"{SCHEDULE_KNOBS.name}.{knob}", getattr(schedule, knob),
                f"one of {', '.join(map(repr, allowed))}: a request names no files",
            )  # fmt: skip
    return schedule
