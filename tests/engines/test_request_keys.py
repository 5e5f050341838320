"""The keys of vLLM's own requests are in the table of docs/http.md."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.deployments.test_vllm_keys import TABLE
from tests.engines.test_bench_serve import PYTHON

KEYS = """
import json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

print(json.dumps(sorted({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields})))
"""


@pytest.mark.skipif(PYTHON is None, reason="no vLLM here")
@pytest.mark.timeout(300)
def test_the_table_has_every_key_of_vllm() -> None:
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [str(PYTHON), "-c", KEYS], capture_output=True, text=True, env=offline, check=True
    )
    keys = set(json.loads(done.stdout.strip().splitlines()[-1]))
    assert len(keys) > 60
    assert not keys - TABLE.keys()
