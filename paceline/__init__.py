"""Paceline: exact draft-then-verify decoding for language models.

    import paceline

    engine = paceline.load_engine()  # the demo pair
    prompt = engine.tokenizer.encode("def main():")
    (session,) = engine.generate([prompt], paceline.SamplingParams(max_tokens=64))
    print(session.text, session.stats.mean_accepted_length)

Names are imported when they are first used: ``import paceline`` alone loads neither torch nor
anything else that is heavy.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# Threads of a forward wait for one another in a busy loop. With the default number of spins, a
# thread whose partner lost its core to another process wastes its own core: on busy machines a
# forward took ten times as long. And as soon as two Python threads have run forwards, as in every
# server, OpenMP counts more threads than processors and spins a tenth of that: its threads fell
# asleep at every barrier, and a forward of eight rows took four times as long. Only the policy
# "active" lifts that second limit. torch reads both when it loads OpenMP; a user's settings win.
if sys.platform == "linux" and "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "active"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_EXPORTS = {
    "Engine": "paceline.engine",
    "EngineLimits": "paceline.engine",
    "EngineThread": "paceline.engine",
    "METHODS": "paceline.methods",
    "PacelineError": "paceline.errors",
    "SamplingParams": "paceline.sampling",
    "SpeculationConfig": "paceline.config",
    "load_engine": "paceline.loading",
    "load_runner": "paceline.loading",
}

__all__ = [
    "METHODS",
    "Engine",
    "EngineLimits",
    "EngineThread",
    "PacelineError",
    "SamplingParams",
    "SpeculationConfig",
    "__version__",
    "load_engine",
    "load_runner",
]

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig
    from paceline.engine import Engine, EngineLimits, EngineThread
    from paceline.errors import PacelineError
    from paceline.loading import load_engine, load_runner
    from paceline.methods import METHODS
    from paceline.sampling import SamplingParams


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
