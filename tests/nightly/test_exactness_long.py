"""Exactness once more, on enough text to meet what is rare."""

from __future__ import annotations

import pytest

from paceline.engine import Engine
from paceline.loading import load_engine
from tests.core.suite import CASES, CORE_CASES, OTHER_LOSSLESS_CASES, Suite

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine()


@pytest.fixture(scope="module")
def suite(demo: Engine) -> Suite:
    return Suite(demo, 256, 128, batch=32)


@pytest.fixture(scope="module")
def shorter_suite(demo: Engine) -> Suite:
    return Suite(demo, 40, 64, batch=32)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), CORE_CASES)
def test_tokens_are_those_of_ar(method: str, variant: str, batch: int, suite: Suite) -> None:
    suite.check(method, variant, batch)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), OTHER_LOSSLESS_CASES)
def test_tokens_of_every_method_are_those_of_ar(
    method: str, variant: str, batch: int, shorter_suite: Suite
) -> None:
    """Ten times the tokens of the everyday suite."""
    shorter_suite.check(method, variant, batch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("method", "variant"), [case for case in CASES if case[0] == "ar"])
def test_ar_does_not_depend_on_its_batch(method: str, variant: str, dtype: str) -> None:
    suite = Suite(load_engine(dtype=dtype, batch_invariant=True), 64, 128, batch=64)
    suite.check(method, variant, batch=1)


@pytest.mark.parametrize(("method", "variant"), CASES)
def test_in_bfloat16(method: str, variant: str) -> None:
    suite = Suite(load_engine(dtype="bfloat16", batch_invariant=True), 32, 128, batch=8)
    suite.check(method, variant, batch=5)
