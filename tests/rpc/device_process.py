"""A client's device: prints a line for each round that was committed, then the result as JSON."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.loading import limit_threads, load_runner
from paceline.rpc.client import open_channel
from paceline.rpc.device import DeviceClient
from paceline.rpc.ladder import Mode
from paceline.sampling import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--ca", type=Path, required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    limit_threads(1)
    runner = load_runner(options.drafter, kv_tokens=2048, batch_invariant=False)
    params = SamplingParams(
        max_tokens=options.max_tokens, temperature=options.temperature, seed=5, ignore_eos=True
    )
    with DeviceClient(
        [options.server], {"draft_model": DraftModel(runner)},
        speculation=SpeculationConfig(method="draft_model", length="fixed"),
        connect=partial(open_channel, ca=options.ca),
        modes=(Mode.DEVICE,),
    ) as client:  # fmt: skip
        for done in client.generate(list(options.prompt.encode()), params):
            print(len(done.token_ids), flush=True)
        counters = client.result.counters
        print(
            json.dumps(
                {
                    "token_ids": client.result.token_ids,
                    "num_failures": counters.num_failures,
                    "travel_seconds": counters.median_travel_seconds,
                }
            )
        )


if __name__ == "__main__":
    main()
