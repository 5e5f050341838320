"""Nodes can be drained: the chart's budgets under the rules of Kubernetes' controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from helm_python.chart import Chart
from helm_python.errors import HelmError

from tests.helm.conftest import only, render

ROLES = ("target", "drafter", "gateway")


@dataclass(frozen=True)
class _Pod:
    """A pod with the kind of its controller; ``healthy`` is whether it is ready."""

    labels: dict[str, str]
    owner: str = "RayCluster"
    healthy: bool = True


# Kinds whose scale the controller can read: built in, or custom with a scale subresource.
SCALES = {"ReplicaSet", "StatefulSet", "ReplicationController"}


def disruptions_allowed(budget: dict[str, Any], pods: list[_Pod]) -> int:
    """``trySync`` of pkg/controller/disruption/disruption.go, with every set's scale met.

    ``getExpectedPodCount`` asks the owners of the pods for their scale, unless the budget is an
    integer ``minAvailable``. An owner without a scale is an error, and then the controller fails
    safe: it allows nothing.
    """
    spec = budget["spec"]
    pods = [p for p in pods if spec["selector"]["matchLabels"].items() <= p.labels.items()]
    least = spec.get("minAvailable")
    if isinstance(least, int):
        expected, desired = len(pods), least
    else:
        if any(pod.owner not in SCALES for pod in pods):
            return 0  # "does not implement the scale subresource"
        expected = len(pods)
        amount = spec["maxUnavailable"] if least is None else least
        share = isinstance(amount, str)
        number = -(-expected * int(amount.rstrip("%")) // 100) if share else amount
        desired = max(0, expected - number) if least is None else number
    allowed = sum(pod.healthy for pod in pods) - desired
    return allowed if expected > 0 and allowed > 0 else 0


def may_evict(budgets: list[dict[str, Any]], pods: list[_Pod], pod: _Pod) -> bool:
    """``Create`` of pkg/registry/core/pod/storage/eviction.go."""
    budgets = [
        b for b in budgets if b["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
    ]
    if not pod.healthy and all(
        b["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow" for b in budgets
    ):
        return True
    return all(disruptions_allowed(budget, pods) > 0 for budget in budgets)


def budgets_and_pods(
    chart: Chart, values: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[_Pod]]:
    """The budgets of a release, and its fewest pods once it serves."""
    objects = render(chart, values)
    cluster = only(objects, "RayService")["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [
        _Pod(group["template"]["metadata"]["labels"])
        for group in groups
        for _ in range(group.get("minReplicas", 1))
    ]
    return [o for o in objects if o["kind"] == "PodDisruptionBudget"], pods


def of(pods: list[_Pod], role: str) -> list[_Pod]:
    return [pod for pod in pods if pod.labels["app.kubernetes.io/component"] == role]


def sizes(count: int) -> dict[str, Any]:
    return {role: {"num_replicas": count} for role in ROLES}


def test_the_model_refuses_what_kubernetes_does() -> None:
    labels = {"app": "x"}

    def allowed(count: int, owner: str = "RayCluster", **spec: Any) -> int:
        budget = {"spec": {"selector": {"matchLabels": labels}, **spec}}
        return disruptions_allowed(budget, [_Pod(labels, owner)] * count)

    for count in (1, 2, 8):
        for spec in ({"maxUnavailable": 1}, {"maxUnavailable": "50%"}, {"minAvailable": "0%"}):
            assert allowed(count, **spec) == 0, "a RayCluster has no scale subresource"
            assert allowed(count, "ReplicaSet", **spec) > 0
    assert allowed(3, minAvailable=2) == 1
    assert allowed(1, minAvailable=1) == 0
    assert allowed(0, minAvailable=0) == 0


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_pod_can_be_drained_and_all_but_one_stay(chart: Chart, count: int) -> None:
    budgets, pods = budgets_and_pods(chart, sizes(count))
    assert len(budgets) == (0 if count == 1 else 3)
    for pod in pods:  # each by itself, the head too
        assert may_evict(budgets, pods, pod)
    for role in ROLES:
        group = of(pods, role)
        assert len(group) == count
        if count > 1:  # a second one has to wait for the first one's successor
            assert not may_evict(budgets, [p for p in pods if p is not group[0]], group[1])
            broken = _Pod(group[0].labels, healthy=False)
            assert may_evict(budgets, [broken, *group[1:]], broken), "it would hold its node"


def test_budgets_follow_the_fewest_pods_of_an_autoscaled_group(chart: Chart) -> None:
    scaling = {"target": {"autoscaling": {"min_replicas": 3, "max_replicas": 8}}}
    for values in ({}, {"ray": {"autoscaling": {"enabled": False}}}):
        budgets, pods = budgets_and_pods(chart, {**scaling, **values})
        (budget,) = budgets
        fewest = len(of(pods, "target"))
        assert fewest == (8 if values else 3)
        assert budget["spec"]["minAvailable"] == fewest - 1
    upgrade = {
        "strategy": "NewClusterWithIncrementalUpgrade",
        "incremental": {"gatewayClassName": "istio"},
    }
    budgets, _ = budgets_and_pods(chart, {**sizes(4), "upgrade": upgrade})
    assert [b["spec"]["minAvailable"] for b in budgets] == [3, 3, 3]


def test_a_budget_that_would_block_every_drain_is_refused(chart: Chart) -> None:
    def values(least: int) -> dict[str, Any]:
        return {**sizes(3), "pods": {"target": {"podDisruptionBudget": {"minAvailable": least}}}}

    budgets, _ = budgets_and_pods(chart, values(1))
    assert sorted(b["spec"]["minAvailable"] for b in budgets) == [1, 2, 2]
    assert len(budgets_and_pods(chart, values(0))[0]) == 2
    with pytest.raises(HelmError, match=r"minAvailable: 3 of 3 pods .* allowed are 0 to 2"):
        render(chart, values(3))
