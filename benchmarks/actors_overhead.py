"""The time that a drafter in an actor of its own adds to a round.

Deploys the demo pair in both topologies on a local Ray and runs the same prompts on both in turn.
A round's time is the gap between two replies of one generation, taken at a client that is connected
to the target itself. Both topologies compute the same drafts and verify the same tokens, so the
difference of the medians is what the second process, gRPC and waiting for threads add.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time

from paceline.cluster import local, local_ray, serving
from paceline.config import SpeculationConfig
from paceline.deployments.config import CONFIGS_DIR, ConfigFile, read_config_file
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams

PROMPTS = (
    "def read_config(path):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import os\nimport sys\n\n\ndef main(argv):\n",
)


def _file(topology: str) -> ConfigFile:
    shipped = {"actors": "demo.yaml", "colocated": "colocated.yaml"}[topology]
    file = read_config_file(CONFIGS_DIR / shipped)
    small = {name: {"num_cpus": 0.2} for name in ("target", "drafter")}
    file = file.with_args(
        {**small, "gateway": {"num_cpus": 0.1, "grpc_port": 0, "http_port": None}}
    )
    return file.model_copy(update={"name": topology})


def _gaps(
    client: Client, prompt: str, params: SamplingParams
) -> tuple[list[float], tuple[int, ...]]:
    """Seconds between the replies of one generation, and its tokens."""
    arrivals: list[float] = []
    tokens: list[int] = []
    for item in client.generate(prompt, params, SpeculationConfig(method="draft_model")):
        arrivals.append(time.perf_counter())
        tokens += item.token_ids
    return [b - a for a, b in itertools.pairwise(arrivals)], tuple(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8, help="runs of each prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    files = {topology: _file(topology) for topology in ("colocated", "actors")}
    with local.showing_progress() as report:
        report("starting Ray")
        local_ray.start_ray(files["actors"])
        for file in files.values():
            serving.deploy(file, report)
        targets = {
            name: serving.describe(name)["deployments"]["target"]["replicas"][0]["address"]
            for name in files
        }
        clients = {name: Client(address, timeout=120) for name, address in targets.items()}
        gaps: dict[str, list[float]] = {name: [] for name in files}
        for repeat in range(options.repeats + 1):
            report(f"repeat {repeat} of {options.repeats}")
            for prompt in PROMPTS:
                seen = set()
                for name, client in clients.items():
                    measured, tokens = _gaps(client, prompt, params)
                    seen.add(tokens)
                    if repeat:  # the first one warms up
                        gaps[name] += measured
                assert len(seen) == 1, "the topologies gave different tokens"
        counters = serving.describe("actors")["deployments"]["target"]["replicas"][0]
        report("")
    frames = counters["draft_frames"]
    wait = counters["draft_wait_seconds"] - counters["draft_compute_seconds"]
    p50 = {name: 1e3 * statistics.median(values) for name, values in gaps.items()}
    result = {
        **{f"{name}_round_ms_p50": value for name, value in p50.items()},
        "added_ms_p50": p50["actors"] - p50["colocated"],
        "num_rounds": len(gaps["actors"]),
        "draft_compute_ms_mean": 1e3 * counters["draft_compute_seconds"] / frames,
        "draft_transport_ms_mean": 1e3 * wait / frames,
    }
    for client in clients.values():
        client.close()
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for key, value in result.items():
            print(f"{key:<26}", f"{value:.3f}" if isinstance(value, float) else value)


if __name__ == "__main__":
    main()
