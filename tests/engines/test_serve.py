"""`engine: vllm` behind the gateway: gRPC, the OpenAI endpoint, metrics, draft actors that die."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from paceline.config import SpeculationConfig
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.rpc.client import Client
from paceline.rpc.device import DeviceClient
from paceline.sampling import SamplingParams
from tests.engines.conftest import HAS_VLLM, WITHOUT

pytestmark = [
    pytest.mark.skipif(not HAS_VLLM, reason=WITHOUT),
    pytest.mark.serve,
    pytest.mark.timeout(600),
]

PROMPTS = (
    "def fibonacci(n):\n",
    "Question: Tom has 3 bags with 4 apples each. How many apples has he?\nAnswer:",
    "import os\nimport sys\n\n\ndef main():\n",
)
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
SMALL: dict[str, Any] = {"num_cpus": 0.1}


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[str, str]]:
    """gRPC and HTTP addresses of an application whose drafter is an actor of its own."""
    from paceline.cluster import local_ray, serving

    local_ray.prepare_environment(secrets.token_hex(32))
    import ray

    from paceline.deployments.config import CONFIGS_DIR, read_config_file

    file = read_config_file(CONFIGS_DIR / "vllm.yaml").with_args(
        {
            "target": SMALL,
            "drafter": SMALL,
            "gateway": {**SMALL, "grpc_port": 0, "http_port": 0},
            "vllm": {"enforce_eager": True, "max_model_len": 512, "draft_deadline_s": 0.5},
        }
    )
    local_ray.start_ray(file)
    serving.start_serve(file)
    serving.deploy(file, lambda line: None)
    described = serving.describe(file.name)
    yield described["gateway"], described["http"]
    ray.shutdown()


def test_tokens_methods_and_actors(gateway: tuple[str, str]) -> None:
    address, http = gateway
    with Client(address, timeout=120) as client:
        model = client.get_model()
        assert {"ar", "draft_model", "suffix_decoding", "combined"} <= set(model.methods)
        assert not {"eagle", "vllm_ngram", "layer_skip"} & set(model.methods)
        ar = [client.complete(p, GREEDY, SpeculationConfig(method="ar")) for p in PROMPTS]
        drafted = [client.complete(p, GREEDY) for p in PROMPTS]  # the default: draft_model
        expected = [completion.token_ids for completion in ar]
        assert [completion.token_ids for completion in drafted] == expected
        assert all(c.statistics.num_accepted for c in drafted)
        assert drafted[0].last.target_pid != drafted[0].last.drafter_pid
        with ThreadPoolExecutor(8) as pool:
            methods = ["draft_model", "suffix_decoding", "ar", "prompt_lookup"] * 4
            jobs = [(p, m) for p in PROMPTS for m in methods]
            done = list(
                pool.map(
                    lambda job: client.complete(job[0], GREEDY, SpeculationConfig(method=job[1])),
                    jobs,
                )
            )
        assert [c.token_ids for c in done] == [t for t in expected for _ in methods]
        with pytest.raises(InvalidArgument, match="hidden_states"):
            client.complete(PROMPTS[0], GREEDY, SpeculationConfig(method="eagle"))

    sdk = openai.OpenAI(base_url=f"{http}/v1", api_key="none")
    answer = sdk.completions.create(
        model="paceline", prompt=PROMPTS[0], max_tokens=64, temperature=0,
        extra_body={"return_token_ids": True, "speculation": {"method": "prompt_lookup"}},
    )  # fmt: skip
    assert answer.choices[0].text == ar[0].text


def test_the_drafter_dies_and_serve_brings_another(gateway: tuple[str, str]) -> None:
    address, _ = gateway
    long = SamplingParams(max_tokens=300, ignore_eos=True)
    with Client(address, timeout=120) as client:
        expected = client.complete(PROMPTS[0], long, SpeculationConfig(method="ar")).token_ids
        from paceline.cluster import serving

        (drafter,) = serving.describe("paceline")["deployments"]["drafter"]["replicas"]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.complete, PROMPTS[0], long)
            os.kill(drafter["pid"], signal.SIGKILL)
            assert running.result().token_ids == expected
        for _ in range(60):
            again = client.complete(PROMPTS[0], GREEDY)
            assert again.token_ids == expected[:64]
            if again.statistics.num_drafted:
                break
        assert again.statistics.num_accepted > 0


def test_no_drafts_from_devices(gateway: tuple[str, str]) -> None:
    address, _ = gateway
    with (
        DeviceClient([address], speculation=SpeculationConfig(method="prompt_lookup")) as device,
        pytest.raises(FailedPrecondition, match="through GenerateService"),
    ):
        device.complete([1, 2, 3], GREEDY)
