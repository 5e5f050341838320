"""Hostile messages for every RPC and HTTP route: nothing fails, dies, stalls, grows or stays.

PACELINE_HOSTILE_MESSAGES says how many: by default 1,000,000, in some hours; continuous integration
sends 20,000 (`make soak`).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.deployments.openai.api import UNSUPPORTED, make_app
from paceline.rpc.access import Gate
from tests.deployments.hostile import GETS, KV_TOKENS, POSTS, assault
from tests.modelzoo import make_model

MANY = int(os.environ.get("PACELINE_HOSTILE_MESSAGES", "1000000"))
LONGEST_STALL_S = 5.0
"""Far above what a busy machine does to an event loop, and below what the worst requests did."""


def test_every_route_is_tried() -> None:
    app = make_app(None, Gate())  # type: ignore[arg-type]
    paths = {route.path for route in app._app.routes if hasattr(route, "methods")}  # type: ignore[union-attr]
    routes = {path.replace(":path", "") for path in paths}
    assert {"/v1/completions", "/v1/models"} <= routes
    assert routes - set(UNSUPPORTED) <= {*POSTS, *GETS}


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
async def test_hostile_messages(zoo: Path) -> None:
    result = await assault(make_model("llama", zoo), MANY, seed=MANY)
    print(dict(result.codes.most_common()), dict(result.statuses.most_common()))
    print(result.before, result.after, f"longest stall {result.longest_stall_s:.2f} s")
    assert result.num_messages >= MANY
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= set(result.codes)
    assert {"200", "400", "404"} <= set(result.statuses)
    assert result.num_honest > 5
    assert result.longest_stall_s < LONGEST_STALL_S
    assert result.after["kv_free"] == result.after["drafter_free"] == KV_TOKENS
    assert result.after["rss"] <= 1.05 * result.before["rss"]
