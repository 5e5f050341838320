"""The exactness promise on SmolLM2 through the gateway of a real cluster, every night.

Target, drafter and gateway are replicas of Serve; devices draft here. The product is that of
tests/nightly/test_chat_exactness.py without its first place, and PACELINE_CHAT_SIZE means the same:

    make test-nightly PYTEST_ARGS="tests/deployments/test_chat_exactness.py -k q4_1-actors-batch8"

A case takes as long as it does there: with PACELINE_CHAT_SIZE=8x16 half an hour for each precision,
at full size most of a day.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.to_gguf import to_gguf
from paceline.cluster import serving
from tests.chat.conftest import open_chat
from tests.chat.suite import PRECISIONS, Case, Chat, all_cases
from tests.deployments.conftest import SMALL, config_file, free_port, serve
from tests.heads import untrained_heads
from tests.nightly.test_chat_exactness import SIZE

pytestmark = [pytest.mark.nightly, pytest.mark.serve, pytest.mark.timeout(3600)]

# Of one precision; the application with the target in another one is deployed when these are done.
CASES = [case for case in all_cases() if case.precision == "q4_1" and case.place != "process"]


@pytest.fixture(scope="module")
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    num_prompts, num_tokens = map(int, SIZE.split("x"))
    return open_chat(request, tmp_path_factory, num_prompts, num_tokens)


@pytest.fixture(scope="module")
def drafter_file(chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The draft model of the other places, as a file that a replica loads."""
    file = tmp_path_factory.mktemp("smollm2") / "drafter.gguf"
    to_gguf(chat.folder, file, "Q4_0")
    return str(file)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, ray_cluster: None, chat: Chat, drafter_file: str
) -> Iterator[tuple[str, str]]:
    """A precision, and the gateway of an application with the target in it."""
    precision = request.param
    as_it_is = precision == "q4_1"
    folder = chat.gguf if as_it_is else chat.folder
    model = {
        "target": "smollm2" if as_it_is else str(folder),
        "dtype": "auto" if as_it_is else precision,
        "drafter": drafter_file,
        "heads": str(untrained_heads(folder)),
        "kv_tokens": 8192,
        "threads": 1,
    }
    file = config_file("actors", f"chat-{precision.replace('_', '-')}", free_port()).with_args(
        {"model": model, "drafter": {**SMALL, "deadline_s": 60.0}}
    )
    serving.deploy(file, lambda line: None)
    yield precision, serving.describe(file.name)["gateway"]
    serve.delete(file.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case).removeprefix("q4_1-"))
@pytest.mark.parametrize("served", PRECISIONS, indirect=True)
def test_tokens_are_those_of_ar(served: tuple[str, str], case: Case, chat: Chat) -> None:
    precision, address = served
    case = case._replace(precision=precision)
    prompts, params = range(len(chat.prompts)), chat.params(case.temperature, chat.num_tokens)
    asked = chat.over_grpc if case.place == "actors" else chat.from_devices
    chat.compare(case, prompts, chat.num_tokens, asked(address, case, prompts, params))
