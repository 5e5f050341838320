"""Pretrain the demo target: a deep, thin Llama whose early layers can already predict.

The recipe is LayerSkip (arXiv 2404.16710): layers are skipped at random during training, later ones
more often (section 3.1), and intermediate layers are read out through the shared final norm and
LM head with a loss of their own (section 3.2). Two differences. A layer is skipped for a whole
batch, not per sequence, so that skipping saves its compute. In the second half of training an
exit's label is, every other step, the last layer's own argmax instead of the text's next token,
because a drafting exit must agree with the last layer.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Shape, budget and optimiser of the target."""

    vocab_size: int = 4096
    hidden_size: int = 160
    intermediate_size: int = 416
    num_layers: int = 20
    num_heads: int = 5
    minutes: float = 65.0
    """Training time. The learning rate follows the elapsed share of it, so a slower
    machine trains on fewer tokens and still ends with a fully decayed rate."""
    max_steps: int | None = None
    """If set, the learning rate follows `step / max_steps` instead and `minutes` is ignored."""
    batch_size: int = 8
    sequence_length: int = 512
    long_share: float = 0.15
    """Last share of the training that uses sequences twice as long (and half as many)."""
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    warmup: float = 0.02
    """Share of the training in which the learning rate rises from 0."""
    layer_dropout: float = 0.1
    """Rate at the last layer, at the start of the training; it falls to 0 at the end."""
    exit_weight: tuple[float, float] = (0.6, 0.3)
    """Weight of the exit losses together, at the start and at the end of the training."""
    checkpoint_seconds: float = 180.0
    seed: int = 0


def llama_config(config: PretrainConfig, num_layers: int, intermediate_size: int) -> LlamaConfig:
    """The Hugging Face config of a demo model; target and drafter share all but depth and FFN."""
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        head_dim=config.hidden_size // config.num_heads,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


def pick_device() -> torch.device:
    """A CUDA GPU if the machine has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def new_model(
    config: LlamaConfig,
    weights: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """A model on the device of `pick_device`, in evaluation mode, with `weights` or random ones.

    None of its layers is compiled, whatever model the weights come from.
    """
    model: torch.nn.Module = LlamaForCausalLM(config)
    model.to(device=pick_device(), dtype=dtype).eval()
    if weights is not None:
        model.load_state_dict(weights)
    assert isinstance(model, LlamaForCausalLM)
    return model


def compile_if_possible(model: LlamaForCausalLM, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Compile every layer in place and return the compiled `loss`; eager without a C++ compiler.

    On a 2-core CPU this raises training from 2,100 to 3,700 tokens/s.
    """
    if shutil.which(os.environ.get("CXX", "g++")) is None or os.environ.get("PACELINE_EAGER"):
        return loss
    torch._dynamo.config.recompile_limit = 64  # two sequence lengths, train and eval, and exits
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    compiled: Callable[..., Any] = torch.compile(loss, dynamic=False)
    return compiled


def layer_states(
    model: LlamaForCausalLM, token_ids: Tensor, keep: Sequence[bool] | None = None
) -> list[Tensor]:
    """Hidden states after each layer, before the final norm: num_layers x [batch, length, hidden].

    `token_ids`: int64 [batch, length]. Layers with `keep[i]` false pass their input on.
    """
    hidden = model.model.embed_tokens(token_ids)
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
    rope = model.model.rotary_emb(hidden, positions)
    states = []
    for i, layer in enumerate(model.model.layers):
        if keep is None or keep[i]:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rope)
        states.append(hidden)
    return states


def token_batch(
    stream: NDArray[np.uint16], step: int, batch: int, length: int, seed: int
) -> Tensor:
    """Batch number `step`: int64 [batch, length + 1], a pure function of its arguments.

    Every epoch cuts the stream at another offset into windows and takes each window once.
    """
    count = (len(stream) - 1) // length - 1
    if count < 1:
        raise ValueError(f"corpus has {len(stream)} tokens; at least {2 * length + 1} are needed")
    rows = []
    for i in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(i, count)
        rng = np.random.default_rng([seed, epoch])
        offset = int(rng.integers(length))
        start = offset + int(rng.permutation(count)[index]) * length
        rows.append(stream[start : start + length + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def build_optimizers(
    model: torch.nn.Module, muon_lr: float, adamw_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embedding and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    return [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.05, momentum=0.95),
        torch.optim.AdamW(others, lr=adamw_lr, weight_decay=0.0, betas=(0.9, 0.97), fused=True),
    ]


def learning_rate(progress: float, warmup: float) -> float:
    """Factor on the peak rate: linear warm-up, half constant, then linear to 0 at progress 1."""
    if progress < warmup:
        return max(progress, 1e-3) / warmup
    return min(1.0, max(0.0, (1.0 - progress) / 0.6))


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write atomically: a kill leaves the old checkpoint or the new one, never half of one."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


class Trainer:
    """The base of both training stages: budget, learning rate, progress bar, checkpoints."""

    def __init__(
        self,
        path: Path,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        minutes: float,
        max_steps: int | None,
        warmup: float,
        checkpoint_seconds: float,
        label: str,
    ) -> None:
        self.path, self.model, self.optimizers = path, model, optimizers
        self.minutes, self.max_steps, self.warmup = minutes, max_steps, warmup
        self.checkpoint_seconds = checkpoint_seconds
        self.base_lrs = [o.param_groups[0]["lr"] for o in optimizers]
        self.step = self.tokens = 0
        self.seconds = 0.0  # training time of all runs so far
        if path.exists():
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.tokens = state["step"], state["tokens"]
            self.seconds = state["seconds"]
            print(f"{label}: resumed at step {self.step}, {self.seconds / 60:.1f} min", flush=True)
        self.bar = tqdm(desc=label, initial=self.tokens, unit="tok", unit_scale=True, mininterval=5)

    @property
    def progress(self) -> float:
        """Used share of the budget, 0 to 1."""
        if self.max_steps is not None:
            return min(1.0, self.step / self.max_steps)
        return min(1.0, self.seconds / (60.0 * self.minutes))

    def save(self) -> None:
        """Write the checkpoint now."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        save_checkpoint(self.path, state)

    def run(self, loss_of_step: Callable[[int, float], tuple[Tensor, float, int]]) -> None:
        """Train to the end of the budget.

        `loss_of_step(step, progress)` returns the loss to minimise, the loss to show and the
        number of tokens in the batch.
        """
        last_save = time.monotonic()
        shown = 0.0
        while self.progress < 1.0:
            started = time.monotonic()
            factor = learning_rate(self.progress, self.warmup)
            for optimizer, base in zip(self.optimizers, self.base_lrs, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = base * factor
            loss, value, tokens = loss_of_step(self.step, self.progress)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.tokens += tokens
            self.seconds += time.monotonic() - started
            shown = value if shown == 0.0 else 0.95 * shown + 0.05 * value
            left = self.seconds * (1 / max(self.progress, 1e-6) - 1)
            self.bar.set_postfix_str(
                f"step {self.step} loss {shown:.3f} eta {left / 60:.0f} min", refresh=False
            )
            self.bar.update(tokens)
            if time.monotonic() - last_save > self.checkpoint_seconds:
                self.save()
                last_save = time.monotonic()
        self.save()
        self.bar.close()


@dataclass(frozen=True)
class Trained:
    """A finished model, float32 in evaluation mode, and its cost."""

    model: LlamaForCausalLM
    steps: int
    tokens: int
    seconds: float

    @classmethod
    def of(cls, trainer: Trainer, model: LlamaForCausalLM) -> Trained:
        """Copy the weights into a model whose layers are not compiled."""
        fresh = new_model(model.config, model.state_dict())
        return cls(fresh, trainer.step, trainer.tokens, trainer.seconds)


def pretrain(config: PretrainConfig, stream: NDArray[np.uint16], path: Path) -> Trained:
    """Train the target on `stream`, uint16 [num_tokens].

    The state is kept in `path`; a call after an interruption resumes from there, and a call after
    the end returns the finished model at once.
    """
    torch.manual_seed(config.seed)
    device = pick_device()
    shape = llama_config(config, config.num_layers, config.intermediate_size)
    model = new_model(shape).train()
    num_layers = config.num_layers
    low = [e for e in (2, 2, 2, 4, 4, 6) if e < num_layers]
    high = list(range(num_layers // 3 + 1, num_layers - 1)) or low
    head, norm = model.model.embed_tokens, model.model.norm

    def read_out(hidden: Tensor, labels: Tensor, want_argmax: bool) -> tuple[Tensor, Tensor | None]:
        logits = F.linear(norm(hidden), head.weight).flatten(0, 1)  # [batch * length, vocab]
        best = logits.detach().argmax(-1).view_as(labels) if want_argmax else None
        return F.cross_entropy(logits.float(), labels.flatten()), best

    trainer = Trainer(
        path, model, build_optimizers(model, config.muon_lr, config.adamw_lr),
        minutes=config.minutes, max_steps=config.max_steps, warmup=config.warmup,
        checkpoint_seconds=config.checkpoint_seconds, label="target",
    )  # fmt: skip
    read_out = compile_if_possible(model, read_out)

    def loss_of_step(step: int, progress: float) -> tuple[Tensor, float, int]:
        long = progress > 1.0 - config.long_share
        batch = config.batch_size // 2 if long else config.batch_size
        length = config.sequence_length * 2 if long else config.sequence_length
        rng = np.random.default_rng([config.seed, 1, step])
        ids = token_batch(stream, step, batch, length, config.seed).to(device)
        labels = ids[:, 1:].contiguous()
        # Equation 2 of the paper: the rate rises exponentially with depth.
        depth = np.exp(np.arange(num_layers) * math.log(2) / (num_layers - 1)) - 1
        rate = config.layer_dropout * (1.0 - progress) * depth
        keep = [bool(k) for k in rng.random(num_layers) >= rate]
        use_argmax = progress > 0.5 and step % 2 == 1
        with torch.autocast(device.type, torch.bfloat16):
            states = layer_states(model, ids[:, :-1], keep)
            final, best = read_out(states[-1], labels, use_argmax)
            exit_labels = labels if best is None else best
            # Each exit is read out on half of the rows: the head is a tenth of the forward's cost.
            half = batch // 2
            first, _ = read_out(states[int(rng.choice(low)) - 1][:half], exit_labels[:half], False)
            second, _ = read_out(
                states[int(rng.choice(high)) - 1][half:], exit_labels[half:], False
            )
        start, end = config.exit_weight
        weight = start + (end - start) * progress
        loss = final + weight * 0.5 * (first + second)
        return loss, float(final.detach()), batch * length

    trainer.run(loss_of_step)
    return Trained.of(trainer, model)


@dataclass(frozen=True)
class ExitQuality:
    """How well the model predicts from one of its layers, on held-out text."""

    layer: int
    loss: float
    """Nats a token, through the shared final norm and LM head."""
    agreement: float
    """Share of positions where the exit's argmax is the last layer's."""


@torch.no_grad()
def measure_exits(model: LlamaForCausalLM, rows: Tensor) -> list[ExitQuality]:
    """Read out every layer on `rows`, int64 [num_rows, length + 1]; layers count from 1."""
    num_layers = model.config.num_hidden_layers
    assert num_layers is not None
    losses, agreements = torch.zeros(num_layers), torch.zeros(num_layers)
    chunks = torch.split(rows, 4)
    for chunk in chunks:
        states = layer_states(model, chunk[:, :-1])
        logits = [model.lm_head(model.model.norm(state)).flatten(0, 1) for state in states]
        best = logits[-1].argmax(-1)
        for i, exit_logits in enumerate(logits):
            loss = F.cross_entropy(exit_logits.float(), chunk[:, 1:].flatten())
            losses[i] += loss.cpu() * len(chunk) / len(rows)
            same = (exit_logits.argmax(-1) == best).float().mean()
            agreements[i] += same.cpu() * len(chunk) / len(rows)
    return [ExitQuality(i + 1, float(losses[i]), float(agreements[i])) for i in range(num_layers)]
