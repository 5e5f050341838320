"""A model on a server as a writer of :mod:`paceline.together.reasoning`."""

from __future__ import annotations

from paceline.config import SpeculationConfig
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams
from paceline.together.reasoning import StepText


class ClientWriter:
    """The target of a server, over gRPC.

    Args:
        speculation: how the server decodes; None: by its default method, or as AR if it cannot.
    """

    def __init__(self, client: Client, speculation: SpeculationConfig | None = None) -> None:
        self._client = client
        if speculation is None:
            model = client.get_model()
            able = model.default_method in model.methods
            speculation = SpeculationConfig(method=model.default_method if able else "ar")
        self._speculation = speculation

    def write(self, text: str, params: SamplingParams) -> StepText:
        """See :class:`paceline.together.reasoning.StepWriter`.

        Raises:
            PacelineError: the server's refusal, or its loss.
        """
        done = self._client.complete(text, params, self._speculation)
        at_stop = any(done.text.endswith(stop) for stop in params.stop)
        ended = done.finish_reason == "stop" and not at_stop
        return StepText(done.text, len(done.token_ids), ended)
