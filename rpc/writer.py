"""A model on a server as a writer of :mod:`paceline.together.reasoning`."""

from __future__ import annotations

from paceline.config import SpeculationConfig
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams
from paceline.together.reasoning import Piece


class ClientWriter:
    """The target of a server, over gRPC.

    Args:
        speculation: how the server decodes; None: its default method.
    """

    def __init__(self, client: Client, speculation: SpeculationConfig | None = None) -> None:
        self._client, self._speculation = client, speculation

    def write(self, text: str, params: SamplingParams) -> Piece:
        """See :class:`paceline.together.reasoning.Writer`.

        Raises:
            PacelineError: the server's refusal, or its loss.
        """
        done = self._client.complete(text, params, self._speculation)
        at_stop = any(done.text.endswith(stop) for stop in params.stop)
        ended = done.finish_reason == "stop" and not at_stop
        return Piece(done.text, len(done.token_ids), ended)
