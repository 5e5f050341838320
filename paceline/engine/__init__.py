"""The decode loop and the engine around it: drafting, scheduling, events, a thread of its own."""

from paceline.engine.engine import Engine
from paceline.engine.events import EventHandler, RoundEvent
from paceline.engine.scheduler import EngineLimits
from paceline.engine.thread import EngineThread, Serving

__all__ = ["Engine", "EngineLimits", "EngineThread", "EventHandler", "RoundEvent", "Serving"]
