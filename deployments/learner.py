"""Online training of the draft model beside serving (:mod:`paceline.train.online`).

Targets record where they reject the draft model's tokens and send that in batches to one learner,
which trains on CPUs of its own. The replicas that host the draft model ask it for new weights, and
get them one after the other. No request waits for any of this: what is too much is dropped and
counted, and while the learner is away, serving goes on with the weights that there are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline.deployments.config import DeploymentConfig
from paceline.deployments.metrics import Exporter, Reporting
from paceline.errors import InvalidArgument

if TYPE_CHECKING:
    from paceline.engine import EngineThread
    from paceline.models.base import ModelRunner
    from paceline.models.llama_weights import LlamaWeights
    from paceline.rejections import RejectedPosition
    from paceline.session import Session
    from paceline.train.online import OnlineTrainer

logger = logging.getLogger(__name__)

SEND_S = 0.5
"""Seconds between two batches of a target."""
ASK_S = 1.0
"""Seconds between two questions of a replica for new weights."""
CALL_TIMEOUT_S = 20.0
TURN_S = 30.0
"""Seconds that a replica gets to load new weights, before it is the next one's turn."""
GONE_S = 60.0
"""Seconds without a question after which a replica no longer counts."""
MAX_VERSIONS = 32
"""Versions of the weights whose acceptance is remembered, the latest ones."""


class NewWeights(NamedTuple):
    """New weights for a draft model: the tensors of its checkpoint, in safetensors."""

    version: int
    data: bytes


class JudgedCounts(NamedTuple):
    """What a target has counted since its last batch; the tokens are the draft model's."""

    judged: int
    accepted: int
    dropped: int


class Rollout:
    """Gives the newest weights to replicas, one at a time.

    Attributes:
        weights: the newest ones; None: none yet.
        loaded: the version that each replica has, 0 at first.
    """

    def __init__(self) -> None:
        self.weights: NewWeights | None = None
        self.loaded: dict[str, int] = {}
        self._seen: dict[str, float] = {}
        self._turn, self._turn_ends = "", 0.0

    def ask(self, replica: str, version: int) -> NewWeights | None:
        """What a replica with these weights should load now: nothing while another one loads."""
        now = time.monotonic()
        self._seen[replica], self.loaded[replica] = now, version
        for gone in [each for each, at in self._seen.items() if now - at > GONE_S]:
            del self._seen[gone], self.loaded[gone]
        if self._turn == replica:  # it has loaded them, or asks anew
            self._turn = ""
        if self.weights is None or version == self.weights.version:
            return None
        if self._turn and now < self._turn_ends:
            return None
        self._turn, self._turn_ends = replica, now + TURN_S
        return self.weights

    @property
    def version(self) -> int:
        """The version that all replicas have, or a newer one."""
        return min(self.loaded.values(), default=0)


@serve.deployment
class LearnerDeployment:
    """Trains the draft model on the rejections that targets send; there is one replica.

    It keeps them in memory only. After a restart it starts from the draft model's checkpoint.
    """

    async def __init__(self, config: DeploymentConfig) -> None:
        self._config, self._options = config, config.online
        self._rollout = Rollout()
        self._inbox: deque[RejectedPosition] = deque()
        self._num_dropped = 0
        self._rates: OrderedDict[int, list[int]] = OrderedDict()  # version -> judged, accepted
        self._trainer = await asyncio.to_thread(self._load)
        self._published_at = time.monotonic()
        self._training = asyncio.create_task(self._train())
        self._reporting = Reporting(config.model.name, self._export)

    def _load(self) -> OnlineTrainer:
        from paceline.loading import limit_threads
        from paceline.rejections import RejectionBuffer
        from paceline.train.online import OnlineTrainer

        options = self._options
        limit_threads(max(1, int(options.num_cpus)))
        local = self._config.with_local_models(target_weights=False)
        assert local.drafter_folder is not None  # the configuration is checked
        buffer = RejectionBuffer(
            options.update_interval, options.batch,
            positions=options.retention.positions, seconds=options.retention.seconds,
        )  # fmt: skip
        return OnlineTrainer(
            Path(local.drafter_folder), buffer,
            divergence=options.divergence, learning_rate=options.learning_rate,
        )  # fmt: skip

    async def add(self, rejections: Sequence[RejectedPosition], counts: JudgedCounts) -> None:
        """Take a target's rejections, and what it has counted."""
        room = self._options.retention.positions - len(self._inbox)
        self._inbox.extend(rejections[:room])
        self._num_dropped += counts.dropped + max(0, len(rejections) - room)
        rate = self._rates.setdefault(self._rollout.version, [0, 0])
        rate[0] += counts.judged
        rate[1] += counts.accepted
        while len(self._rates) > MAX_VERSIONS:
            self._rates.popitem(last=False)

    async def next_weights(self, replica: str, version: int) -> NewWeights | None:
        """The weights that a replica should load now, if any.

        Args:
            version: of the weights that it has; 0: the checkpoint's.
        """
        return self._rollout.ask(replica, version)

    async def _train(self) -> None:
        buffer, trainer = self._trainer.buffer, self._trainer
        while True:
            arrived = [self._inbox.popleft() for _ in range(len(self._inbox))]
            buffer.add(arrived)  # forgets what is too old, too
            try:
                if buffer.due:
                    await asyncio.to_thread(trainer.update)
                    await self._publish()
                    continue
            except Exception:  # serving does not depend on it
                logger.exception("an update of the draft model failed")
            await asyncio.sleep(SEND_S)

    async def _publish(self) -> None:
        """Offer the weights of now, if the last ones are old enough."""
        if time.monotonic() - self._published_at < self._options.rollout_s:
            return
        data = await asyncio.to_thread(self._trainer.weights)
        self._rollout.weights = NewWeights(self._trainer.num_updates, data)
        self._published_at = time.monotonic()

    @property
    def _dropped(self) -> int:
        return self._num_dropped + self._trainer.buffer.num_dropped

    async def _export(self, exporter: Exporter) -> None:
        exporter.total("online_updates", self._trainer.num_updates)
        exporter.total("online_positions_dropped", self._dropped)
        exporter.set("online_positions_buffered", len(self._trainer.buffer) + len(self._inbox))
        exporter.set("online_weights_version", self._rollout.version)
        for label, (judged, accepted) in zip(
            ("current", "previous"), reversed(self._rates.values()), strict=False
        ):
            if judged:
                exporter.set("online_acceptance", accepted / judged, weights=label)

    def status(self) -> dict[str, Any]:
        """Counters for `paceline status`; ``acceptance`` is by the version of the weights."""
        return {
            "replica_id": serve.get_replica_context().replica_id.unique_id,
            "pid": os.getpid(),
            "updates": self._trainer.num_updates,
            "buffered": len(self._trainer.buffer) + len(self._inbox),
            "dropped": self._dropped,
            "version": self._rollout.version,
            "loaded": dict(self._rollout.loaded),
            "acceptance": {v: (a / j if j else None) for v, (j, a) in self._rates.items()},
            "judged": {version: judged for version, (judged, _) in self._rates.items()},
        }

    async def __del__(self) -> None:
        # Serve awaits this once, after draining, and not if the constructor failed.
        if hasattr(self, "_reporting"):
            self._training.cancel()
            await asyncio.gather(self._training, return_exceptions=True)
            await self._reporting.stop()


class RejectionSender:
    """Sends what an engine's target rejects to the learner, beside the requests."""

    def __init__(
        self, engine: EngineThread, learner: DeploymentHandle[Any], config: DeploymentConfig
    ) -> None:
        from paceline.models.layouts import read_config
        from paceline.rejections import RejectionRecorder

        assert config.drafter_folder is not None  # the configuration is checked
        everyone = config.online.without_tenants

        def records(session: Session) -> bool:
            return session.teaches_drafter or (everyone and not session.tenant)

        self._recorder = RejectionRecorder(
            config.online.max_pending, records=records,
            vocab_size=read_config(Path(config.drafter_folder)).get("vocab_size"),
        )  # fmt: skip
        self._learner, self._lost, self._told = learner, 0, JudgedCounts(0, 0, 0)
        engine.call(lambda each: each.events.watchers.append(self._recorder))

    async def run(self) -> None:
        """Send a batch every :data:`SEND_S` seconds until cancelled."""
        away = False
        while True:
            await asyncio.sleep(SEND_S)
            recorder = self._recorder
            batch = recorder.take()
            now = JudgedCounts(
                recorder.num_judged, recorder.num_accepted, recorder.num_dropped + self._lost
            )
            if not batch and now == self._told:
                continue
            changes = (new - old for new, old in zip(now, self._told, strict=True))
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._learner.add.remote(batch, JudgedCounts(*changes))
                self._told, away = now, False
            except Exception as error:  # serving does not depend on it
                self._lost += len(batch)
                if not away:
                    logger.warning("the learner does not answer, its positions are lost: %s", error)
                away = True


class WeightsFollower:
    """Loads the learner's weights into the draft model of this replica.

    Args:
        use: gives packed weights to the runner between two of its forwards.

    Raises:
        InvalidArgument: the draft model is not on the fast path.
    """

    def __init__(
        self,
        learner: DeploymentHandle[Any],
        replica: str,
        runner: ModelRunner,
        use: Callable[[Callable[[LlamaWeights], None], LlamaWeights], Awaitable[None]],
    ) -> None:
        from paceline.models.llama import LlamaRunner

        if not isinstance(runner, LlamaRunner):
            allowed = "false: this draft model is not on the fast path (docs/models.md)"
            raise InvalidArgument("online.enabled", True, allowed)
        self._learner, self._replica, self._runner, self._use = learner, replica, runner, use
        self.version = 0
        self.num_swaps = 0

    async def run(self) -> None:
        """Ask every :data:`ASK_S` seconds until cancelled."""
        while True:
            with suppress(Exception):  # the learner starts, or is away
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    found = await self._learner.next_weights.remote(self._replica, self.version)
                if found is not None:
                    await self._load(found)
                    continue  # says that it is the next one's turn
            await asyncio.sleep(ASK_S)

    async def _load(self, found: NewWeights) -> None:
        version, data = found
        self.version = version  # also if they cannot be loaded: they are not tried again
        try:
            packed = await asyncio.to_thread(self._runner.read_weights, data)
            await self._use(self._runner.use_weights, packed)
            self.num_swaps += 1
        except Exception:
            logger.exception("version %d of the draft model's weights is not used", version)
