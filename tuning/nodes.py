"""The Ray cluster of a sweep: its nodes, how many trials fit on them, and tasks for them.

``ray`` is imported inside the functions: :meth:`TrialCluster.join` first sets the environment that
Ray reads when it is imported.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.tuning.space import Resources, SweepError


@dataclass(frozen=True, slots=True)
class TrialCluster:
    """The cluster that a sweep has joined, and what each of its trials gets.

    Attributes:
        num_nodes: live nodes with CPUs.
        num_cpus, num_gpus: that Ray reserves for a trial.
        places: how many trials run at a time.
        is_own: Ray was started on this machine for this sweep alone.
    """

    num_nodes: int
    num_cpus: float
    num_gpus: float
    places: int
    is_own: bool

    @classmethod
    def join(cls, resources: Resources) -> TrialCluster:
        """Join the cluster that RAY_ADDRESS names, or start a Ray on this machine.

        Raises:
            SweepError: no node has the resources of a trial.
        """
        from paceline.cluster.local_ray import prepare_environment

        address = os.environ.get("RAY_ADDRESS")
        prepare_environment(None if address else secrets.token_hex(32))
        import ray

        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not address:
            options |= {"address": "local", "include_dashboard": False}
        if not ray.is_initialized():
            ray.init(**options)
        gpus = resources.gpus
        nodes = [node["Resources"] for node in _live_nodes()]
        able = [node for node in nodes if node.get("GPU", 0) >= gpus]
        if not able:
            raise SweepError(f"no node of the cluster has {gpus:g} GPUs for a trial (resources)")
        cpus = resources.cpus or min(node["CPU"] for node in able)
        able = [node for node in able if node["CPU"] >= cpus]
        if not able:
            most = max(node["CPU"] for node in nodes)
            raise SweepError(
                f"resources.cpus: no node has {cpus:g} CPUs for a trial, the largest has {most:g}"
            )
        places = sum(
            min(int(node["CPU"] // cpus), int(node.get("GPU", 0) // gpus) if gpus else 10**6)
            for node in able
        )
        return cls(len(nodes), cpus, gpus, places, is_own=not address)

    @property
    def free_cpus(self) -> float:
        """CPUs that nothing on the cluster uses now."""
        import ray

        return float(ray.available_resources().get("CPU", 0.0))

    def submit(self, function: Callable[..., Any], *args: Any, max_retries: int = 0) -> Any:
        """Start a function as a task with the resources of a trial; :func:`get` waits for it."""
        import ray

        task = ray.remote(num_cpus=self.num_cpus, num_gpus=self.num_gpus, max_retries=max_retries)
        return task(function).remote(*args)

    def on_each_node(
        self, function: Callable[..., Any], args: Callable[[int], Sequence[Any]]
    ) -> Mapping[str, Any]:
        """The results of a function on all nodes at once, by the node's address.

        Args:
            args: the function's arguments on the node with this number, from 0.

        Raises:
            SweepError: a node cannot run it.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = ray.remote(num_cpus=0, max_retries=0)(function)
        nodes = _live_nodes()
        answers = [
            task.options(
                num_gpus=self.num_gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(*args(number))
            for number, node in enumerate(nodes)
        ]
        addresses = [node["NodeManagerAddress"] for node in nodes]
        return {
            address: get(answer, f"node {address} cannot be checked")
            for address, answer in zip(addresses, answers, strict=True)
        }


def get(answer: Any, failure: str) -> Any:
    """Wait for the result of a task.

    Raises:
        SweepError: the task failed; the message is ``failure`` and the cause.
    """
    import ray

    try:
        return ray.get(answer)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise SweepError(f"{failure}: {str(cause).strip().splitlines()[-1]}") from error


def _live_nodes() -> list[dict[str, Any]]:
    """Ray's nodes with CPUs; this one's are at most those of the machine.

    The Ray of `paceline up` has more, which its replicas reserve for as long as they run.
    """
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]
    for node in nodes:
        if node["NodeID"] == here:
            node["Resources"]["CPU"] = min(node["Resources"]["CPU"], os.cpu_count() or 1)
    return nodes
