"""A Ray for the sweeps of this folder: the one that is there, or one of its own."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterator

import pytest

from paceline.cluster.local_ray import prepare_environment

# Before anything imports Ray: its settings are read then.
prepare_environment(secrets.token_hex(32))
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, twenty of them
    import ray


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    ours = not ray.is_initialized()
    if ours:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    if ours:
        ray.shutdown()
