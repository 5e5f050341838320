"""A thousand of a model's conversations with itself at once, on a CUDA device.

All conversations go on by one token in each step, which a CUDA graph replays: a slot's token is the
next one of its prompt, or else what the model has just written. So prompts need no pass of their
own, and nothing depends on the host, which looks for ended turns every few steps only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import InvalidArgument
from paceline.models.cuda_graphs import Capture, cuda_capture
from paceline.models.cuda_ops import HEADER, CudaOps, DeviceRows
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.layer import LayerStack, all_layers
from paceline.train.conversations import Conversation, Dialogues

STEPS = 16
"""Steps between two looks at what has ended."""
SPREAD = 4.0
"""Questions are drawn among tokens with at least ``exp(-SPREAD)`` times the likeliest one's
probability (min-p, Nguyen et al. 2024, arXiv 2407.01082)."""


class GpuWriter:
    """Writes conversations.

    Args:
        target: on a CUDA device.
        slots: number of concurrent conversations.
        length: maximum number of tokens of each.
        capture: records a step (:class:`paceline.models.cuda_graphs.Capture`); tests may pass
            another.

    Raises:
        InvalidArgument: the Triton kernels cannot run the target there.
    """

    def __init__(
        self,
        target: HeadTarget,
        dialogues: Dialogues,
        *,
        slots: int = 1536,
        length: int = 1536,
        seed: int = 0,
        capture: Capture | None = None,
    ) -> None:
        self._target, self._dialogues = target, dialogues
        self._device = device = target.embedding.device
        self._length = length
        layers = all_layers(target)
        # The stack doubles what it is asked for.
        self._stack = LayerStack(layers.layers, slots * length // 2)
        if not isinstance(self._stack.ops, CudaOps):
            raise InvalidArgument("device", str(device), "a CUDA device with Triton's kernels")
        self._norm = layers.norm.weight
        self._lm_head = target.lm_head.float()
        torch.manual_seed(seed)
        self._rows = _rows(slots, length, device)
        self._first_slot = 1 + length * torch.arange(slots, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(slots, length, dtype=torch.int64, device=device)
        numbers = torch.zeros(3, slots, dtype=torch.int64, device=device)
        # The place of the token that a step reads, the end of what is known, the end of the turn.
        self._place, self._known, self._last = numbers
        self._temperature = torch.zeros(slots, device=device)
        self._spread = torch.zeros(slots, device=device)
        self._running = torch.zeros(slots, dtype=torch.bool, device=device)
        self._talks: list[Conversation | None] = [None] * slots
        self._capture = capture
        self._replay: Callable[[], object] | None = None

    def write(self) -> Iterator[Conversation]:
        """Yield conversations as they end, for ever."""
        while True:
            ended = (~self._running).nonzero().flatten().tolist()
            done = self._hear(ended) if ended else []
            self._several_steps()
            yield from done

    @torch.no_grad()
    def _several_steps(self) -> None:
        if self._replay is None:
            self._step()  # compiles what a graph cannot record; the next step does the same again
            capture = self._capture or cuda_capture(self._device)
            self._replay = capture(self._step)
        for _ in range(STEPS):
            self._replay()

    def _step(self) -> None:
        """One token for every slot; those that have ended stay where they are."""
        place = self._place
        count, field = len(place), HEADER.index
        rows, number = self._rows.data, place.int()
        header = rows[: len(HEADER) * count].view(len(HEADER), count)
        header[field("token")] = self._tokens.gather(1, place[:, None])[:, 0].int()
        header[field("position")] = number
        header[field("slot")] = self._first_slot + number
        header[field("prefix_length")] = number + 1
        logits = self._logits()
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-20, 1 - 1e-7)))
        unlikely = logits < logits.amax(-1, keepdim=True) - self._spread[:, None]
        drawn = (
            (logits + self._temperature[:, None] * noise)
            .masked_fill_(unlikely, -torch.inf)
            .argmax(-1)
        )
        following = (place + 1).clamp_max(self._length - 1)
        given = following < self._known
        old = self._tokens.gather(1, following[:, None])[:, 0]
        token = torch.where(given | ~self._running, old, drawn)
        self._tokens.scatter_(1, following[:, None], token[:, None])
        self._place.copy_(torch.where(self._running, following, place))
        ends = ~given & ((token == self._dialogues.end) | (following + 1 >= self._last))
        self._running &= ~ends

    def _logits(self) -> Tensor:
        """Of the token after each slot's.  # float32 [slots, vocab_size]"""
        stack, ops = self._stack, self._stack.ops
        assert isinstance(ops, CudaOps)
        count = self._rows.num_rows
        x = self._target.embed(self._rows.data[:count].long())
        ops.run_on_device(
            stack.stack, 0, len(stack.stack.layers), x, stack.pool.keys, stack.pool.values,
            self._rows,
        )  # fmt: skip
        # In 16 bits, the two likeliest tokens would often be equal.
        return F.linear(ops.rmsnorm(x, self._norm, stack.stack.eps).float(), self._lm_head)

    def _hear(self, slots: Sequence[int]) -> list[Conversation]:
        """Take what was written in slots that have ended, and give them new turns."""
        chosen = torch.tensor(slots, device=self._device)
        texts, places = self._tokens[chosen].tolist(), self._place[chosen].tolist()
        done, places_now, known, last, temperature, spread = [], [], [], [], [], []
        for row, (slot, text, place) in enumerate(zip(slots, texts, places, strict=True)):
            talk, start = self._talks[slot], 0
            if talk is not None:
                turn = self._dialogues.hear(talk, text[len(talk.tokens) : place + 1])
                start = place  # written, but not read yet
                if turn == "more" and len(talk.tokens) + talk.max_tokens > self._length:
                    turn = "done" if talk.positions else "dropped"
                if turn == "done":
                    done.append(talk)
                if turn != "more":
                    talk = None
            while talk is None:
                new, start = self._dialogues.begin(), 0
                if len(new.tokens) + self._dialogues.room <= self._length:
                    talk = new
            self._talks[slot] = talk
            texts[row] = talk.tokens + [0] * (self._length - len(talk.tokens))
            places_now.append(start)
            known.append(len(talk.tokens))
            last.append(len(talk.tokens) + talk.max_tokens)
            temperature.append(talk.temperature)
            spread.append(torch.inf if talk.answering else SPREAD)
        self._tokens[chosen] = torch.tensor(texts, device=self._device)
        for state, values in (
            (self._place, places_now), (self._known, known), (self._last, last),
            (self._temperature, temperature), (self._spread, spread),
        ):  # fmt: skip
            state[chosen] = torch.tensor(values, dtype=state.dtype, device=self._device)
        self._running[chosen] = True
        return done


def _rows(slots: int, length: int, device: torch.device) -> DeviceRows:
    """Rows whose contexts are the slots' own parts of the KV pool."""
    size = len(HEADER) * slots
    header = torch.zeros(len(HEADER), slots, dtype=torch.int32, device=device)
    starts = torch.arange(slots, dtype=torch.int32, device=device) * length
    header[HEADER.index("table_start")] = size + starts
    table = torch.arange(1, slots * length + 1, dtype=torch.int32, device=device)
    return DeviceRows(torch.cat([header.flatten(), table]), slots)
