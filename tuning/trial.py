"""What runs on the workers of a sweep: models are loaded here, and nowhere else.

A trial is a Ray Tune trainable: each step measures one more rung of prompts and reports what is
known so far. An actor is used again for the next trial, so that models are loaded once.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import ray
from ray import tune
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.bench.backends import LocalBackend
from paceline.bench.environment import describe_environment
from paceline.bench.prompts import Prompt
from paceline.config import SpeculationConfig
from paceline.deployments.config import DeploymentConfig, parse_config
from paceline.engine import Engine, EngineLimits
from paceline.errors import InvalidArgument, PacelineError
from paceline.lengths.experience import Experience, experience_of
from paceline.loading import limit_threads, load_drafter, load_engine
from paceline.request import Request
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.mirrors import served_with
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.server import RpcServer, start_server
from paceline.sampling import SamplingParams
from paceline.tuning.costs import measure_costs
from paceline.tuning.objective import PairedMeasurement, encode_groups, example_draft
from paceline.tuning.results import OBJECTIVES, ExampleDraft, Metrics, Point
from paceline.tuning.simulator import Simulator
from paceline.tuning.space import Space
from paceline.tuning.traces import record
from paceline.tuning.vllm import VllmBackend

DRAFTER_TIMEOUT_S = 60.0
LEARNING_PASSES = 2
"""How often method ``auto`` decodes the prompts to learn from them."""


@dataclass(frozen=True, slots=True)
class Work:
    """What every worker gets: the space, and the prompts.

    Files of prompts need not be on every node, so the texts travel; model folders have to be.
    """

    document: Mapping[str, Any]
    prompts: tuple[Prompt, ...]
    num_cpus: float

    @property
    def space(self) -> Space:
        return Space.from_dict(self.document)


class Models:
    """The engines of a worker, loaded when a point first wants them."""

    def __init__(self, work: Work) -> None:
        self.space = work.space
        self._work = work
        self._engines: dict[tuple[str, str], Engine] = {}
        self._vllms: dict[tuple[str, str], VllmBackend] = {}
        self._remote: RemoteDrafter | None = None
        self._actor: Any = None
        self._address = ""
        model = self.space.document.model
        self._config = DeploymentConfig(model=model).with_local_models()
        self._template = self.space.document.workload.template(self._config.target_folder)
        limit_threads(self._config.num_threads(work.num_cpus))

    @property
    def params(self) -> SamplingParams:
        """Of all requests."""
        workload = self.space.document.workload
        return workload.sampling_params(is_chat=self._template is not None)

    @property
    def baseline(self) -> Engine:
        """Where AR runs: the dtype of the sweep's model, everything in one process."""
        return self._engine("colocated", str(self.space.document.model.dtype))

    def engine(self, point: Point) -> Engine:
        """The engine that a point wants."""
        return self._engine(point.topology, point.dtype)

    def _engine(self, topology: str, dtype: str) -> Engine:
        if (topology, dtype) not in self._engines:
            model = self.space.document.model
            engine = load_engine(
                self._config.target_folder,
                self._config.drafter_folder if topology == "colocated" else None,
                heads=model.heads,
                dtype=dtype,
                device=model.device,
                batch_invariant=model.batch_invariant,
                kv_tokens=model.kv_tokens,
                limits=EngineLimits(
                    max_sessions=self.space.document.workload.concurrency, prefix_cache=False
                ),
            )
            if topology == "actors":
                remote = self._remote_drafter(engine.target.vocab_size)
                for method in engine.catalogue.values():
                    if served_with(method, "draft_model"):
                        engine.drafters[method.drafter] = remote
            self._engines[topology, dtype] = engine
        return self._engines[topology, dtype]

    def backend(self, point: Point) -> LocalBackend | VllmBackend:
        """What measures a point; points that share an engine share the one of vLLM."""
        if self.space.document.engine == "paceline":
            return LocalBackend(self.engine(point))
        key = point.topology, point.dtype
        if key not in self._vllms:
            document = self.space.document
            config = parse_config(
                {
                    "engine": "vllm",
                    "topology": point.topology,
                    "model": self._config.model.model_copy(
                        update={"dtype": point.dtype}
                    ).model_dump(),
                    "vllm": document.vllm.model_dump(),
                    "speculation": {"method": "ar"},
                    "target": {
                        "limits": {
                            "max_sessions": document.workload.concurrency,
                            "prefix_cache": False,
                        }
                    },
                }
            )
            remote = [self._drafter_address()] if point.topology == "actors" else None
            self._vllms[key] = VllmBackend(config, remote)
        return self._vllms[key]

    def _drafter_address(self) -> str:
        """The drafter in an actor of its own on this node."""
        if self._actor is None:
            if self._config.drafter_folder is None:
                raise InvalidArgument("space.topology", "actors", "a model.drafter to put there")
            here = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            self._actor = DrafterActor.options(scheduling_strategy=here).remote(self._work)
            self._address = str(ray.get(self._actor.start.remote(), timeout=DRAFTER_TIMEOUT_S))
        return self._address

    def _remote_drafter(self, vocab_size: int) -> RemoteDrafter:
        """The drafter in an actor of its own, reached over gRPC."""
        if self._remote is None:
            address = self._drafter_address()
            self._remote = RemoteDrafter(address, vocab_size=vocab_size)
            if not self._remote.wait_ready(DRAFTER_TIMEOUT_S):
                raise PacelineError(f"the drafter's actor at {address} does not answer")
        return self._remote

    @cached_property
    def groups(self) -> list[list[list[int]]]:
        """Token ids of the prompts that are decoded together (:func:`encode_groups`)."""
        workload, backend = self.space.document.workload, self.backend(self.space.ar)
        return encode_groups(workload, self._work.prompts, backend, self._template)

    def measurement(self, point: Point) -> PairedMeasurement:
        """A configuration against AR, with drafters that have learnt nothing yet."""
        backend, ar = self.backend(point), self.space.ar
        shared = (point.topology, point.dtype) == (ar.topology, ar.dtype)
        baseline = backend if shared else self.backend(ar)
        is_chat = self._template is not None
        return PairedMeasurement(point, self.space, backend, baseline, self.groups, is_chat)

    def check(self, point: Point, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises a PacelineError for a point that its engine cannot run."""
        backend = self.backend(point)
        if isinstance(backend, VllmBackend):
            backend.check(point.speculation)
        else:
            session = backend.engine.submit(Request(prompt, params, point.speculation))
            backend.engine.cancel(session.session_id)

    def example(self, point: Point) -> ExampleDraft | None:
        """A draft of this configuration, for a picture; None where vLLM verifies it."""
        if self.space.document.engine == "vllm":
            return None
        return example_draft(self.engine(point), point, self.groups[0][0], self.params)

    def close(self) -> None:
        for backend in self._vllms.values():
            backend.close()
        self._vllms.clear()
        if self._remote is not None:
            self._remote.stop()
        if self._actor is not None:
            ray.kill(self._actor)
        self._remote = self._actor = None
        self._engines.clear()


@ray.remote(num_cpus=0)
class DrafterActor:
    """A drafter replica of its own, for points with the topology ``actors``."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._server: RpcServer | None = None

    async def start(self) -> str:
        """Load the drafter, serve it on loopback, and say where."""
        space = self._work.space
        model = space.document.model
        config = DeploymentConfig(model=model).with_local_models(target_weights=False)
        assert config.drafter_folder is not None
        limit_threads(config.num_threads(self._work.num_cpus))
        drafter = load_drafter(
            config.drafter_folder,
            config.target_folder,
            dtype=model.dtype,
            device=model.device,
            kv_tokens=model.kv_tokens,
        )
        servicer = DraftServicer(
            drafter,
            name="draft_model",
            vocab_size=drafter.vocab_size,
            context_length=drafter.runner.context_length,
        )
        self._server = await start_server(drafter=servicer)
        return str(self._server.address)


class Trial(tune.Trainable):
    """One point of the space against AR.

    The config has ``point`` (a Point as JSON values). Every result has the objectives with their
    bounds, ``metrics`` (Metrics as JSON text) and ``complete``: whether the trial ended by itself.
    """

    def setup(self, config: dict[str, Any], work: Work) -> None:
        logging.getLogger("paceline").setLevel(logging.ERROR)
        self._models = Models(work)
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._begin(new_config)
        return True

    def _begin(self, config: Mapping[str, Any]) -> None:
        self._point = Point.model_validate_json(config["point"])
        self._measurement = self._models.measurement(self._point)

    def step(self) -> dict[str, Any]:
        self._measurement.step()
        complete = self._measurement.is_sure
        example = self._models.example(self._point) if complete else None
        metrics = self._measurement.metrics(example)
        return {
            **flat(metrics),
            "num_prompts": metrics.num_prompts,
            "metrics": metrics.model_dump_json(),
            "node": platform.node(),
            "complete": complete,
            "done": complete,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: what was measured of an unfinished trial is measured anew."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """See :meth:`save_checkpoint`."""

    def cleanup(self) -> None:
        if hasattr(self, "_models"):
            self._models.close()


def flat(metrics: Metrics) -> dict[str, float]:
    """The objectives as Tune and TensorBoard want them: numbers by name."""
    values: dict[str, float] = {}
    for field in OBJECTIVES.values():
        interval = getattr(metrics, field)
        values |= {
            field: interval.value,
            f"{field}_low": interval.low,
            f"{field}_high": interval.high,
        }
    values["tokens_per_second"] = metrics.tokens_per_second
    values["mean_accepted_length"] = metrics.mean_accepted_length
    return values


# --- tasks beside the trials ----------------------------------------------------------------------


def check(work: Work, points: Sequence[str]) -> dict[str, Any]:
    """Load the models on this node and try what can be tried before the first trial.

    Args:
        points: that are tried, as JSON texts.

    Returns:
        ``error`` (a text) where nothing could be measured here, else ``refused``: why the target
        cannot run a point, by the point's key; and ``environment``.
    """
    models = Models(work)
    try:
        group, params = models.groups[0], models.params
        ar = models.space.ar
        backend = models.backend(ar)
        backend.generate(ar.speculation, [group[0][:1]], params)
        refused = {}
        for text in points:
            point = Point.model_validate_json(text)
            try:
                models.check(point, group[0], params)
            except PacelineError as error:
                refused[point.key] = str(error)
        environment = {**describe_environment(), "fingerprint": backend.fingerprint}
        return {"refused": refused, "environment": environment}
    except (PacelineError, ValueError, RuntimeError, OSError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        models.close()


def simulate(work: Work, points: Sequence[str], told: Queue) -> list[str]:
    """Record traces and costs on this node, and predict what can be predicted.

    Args:
        told: gets a line for each stage that begins.

    Returns:
        Predictions as JSON texts.
    """
    models = Models(work)
    try:
        engine, space = models.baseline, models.space
        workload, groups = space.document.workload, models.groups
        prompts = [prompt for group in groups for prompt in group]
        chosen = [Point.model_validate_json(text) for text in points]
        # Elsewhere, and in another dtype, both the tokens and the costs are others.
        here = [p for p in chosen if p.topology == "colocated" and p.dtype == space.ar.dtype]
        configs = [point.speculation for point in here]
        common: dict[str, Any] = {"key": {}, "concurrency": workload.concurrency}
        params = models.params

        def telling(stage: str) -> Callable[[int, int, str], None]:
            return lambda done, total, what: told.put(f"{stage} {done}/{total}: {what}")

        traces = record(engine, configs, prompts, params, **common, progress=telling("traces"))
        # Costs are the machine's: an answer that ends early would only leave fewer rounds.
        params = replace(params, ignore_eos=True)
        costs = measure_costs(engine, configs, prompts, params, **common, progress=telling("costs"))
        simulator = Simulator(traces, costs, space.ar.dtype)
        return [each.model_dump_json(exclude_defaults=True) for each in simulator.predict_all(here)]
    finally:
        models.close()


def confirm(work: Work, points: Sequence[str], learns: bool) -> tuple[list[str], str | None]:
    """Measure some points once more, in turn, in one process.

    Args:
        learns: let method ``auto`` learn from the prompts.

    Returns:
        Metrics as JSON texts, in the order of the points; and what ``auto`` has learnt, as JSON
        text (:meth:`Experience.document`).
    """
    models = Models(work)
    try:
        chosen = [Point.model_validate_json(text) for text in points]
        measurements = [models.measurement(point) for point in chosen]
        while not all(measurement.is_sure for measurement in measurements):
            for measurement in measurements:
                if not measurement.is_sure:
                    measurement.step()
        texts = [
            measurement.metrics(models.example(point)).model_dump_json()
            for point, measurement in zip(chosen, measurements, strict=True)
        ]
        return texts, _learn(models) if learns else None
    finally:
        models.close()


def _learn(models: Models) -> str:
    """Decode the prompts with method ``auto``, and return what it has learnt."""
    learnt, auto = Experience(), SpeculationConfig(method="auto")
    for _ in range(LEARNING_PASSES):
        engine = models.baseline.sibling()  # a lookup would find the answers of the pass before
        for group in models.groups:
            engine.generate(group, models.params, auto)
        learnt.merge(experience_of(engine.length_context).document())
    return json.dumps(learnt.document())
