"""Distil the demo drafter: two layers that predict the target's next token.

The drafter starts as the target's embedding, first two layers and final norm. The frozen target
runs once over the training text and over text that it wrote itself, because a drafter reads the
target's own text when it serves (DistillSpec, arXiv 2310.08461). Its `top_k` probabilities at every
position are kept on disk, so that the drafter can take many passes without the target.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, LlamaForCausalLM

from paceline.config import SpeculationConfig
from paceline.engine import EngineLimits
from paceline.loading import load_engine
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.train.pretrain import (
    PretrainConfig,
    Trained,
    Trainer,
    build_optimizers,
    compile_if_possible,
    layer_states,
    llama_config,
    new_model,
    token_batch,
)


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Shape and budget of the drafter."""

    minutes: float = 70.0
    """Total time. The target writes for at most `sample_share` of it and runs over all text for
    at most `cache_share`; the rest is for training."""
    sample_share: float = 0.2
    cache_share: float = 0.21
    max_steps: int | None = None
    """If set, the training ends after this many steps instead of its share of `minutes`."""
    num_layers: int = 2
    intermediate_size: int = 768
    """Wider than the target's: the added units start with zero output weights."""
    top_k: int = 24
    batch_size: int = 4
    sample_batch: int = 32
    temperatures: tuple[float, ...] = (0.0,) * 7 + (1.0,)
    """Temperatures of the target's texts, in turn; 0 is greedy, as in most serving."""
    sequence_length: int = 1024
    prompt_length: int = 128
    """Length of the corpus windows that the target continues, beside the cut prompts."""
    sampled_repeats: int = 3
    """Passes over a row that the target wrote, for each pass over a row of the corpus."""
    muon_lr: float = 0.02
    adamw_lr: float = 2e-3
    checkpoint_seconds: float = 120.0
    seed: int = 0


@torch.no_grad()
def sample_text(
    model: LlamaForCausalLM, prompts: Tensor, length: int, temperatures: Tensor, seed: int
) -> Tensor:
    """Continue `prompts` (int64 [batch, prompt]) to `length` tokens: int64 [batch, length].

    `temperatures`: float32 [batch], 0 for greedy. Needs a model whose layers are not compiled.
    """
    generator = torch.Generator(prompts.device).manual_seed(seed)
    cache = DynamicCache(config=model.config)
    token_ids, new = prompts, prompts
    while token_ids.shape[1] < length:
        logits = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        noise = torch.rand(logits.shape, generator=generator, device=logits.device)
        gumbel = -torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))
        # argmax(logits + T * gumbel) samples from softmax(logits / T), and is greedy at T = 0.
        new = (logits.float() + temperatures[:, None] * gumbel).argmax(-1, keepdim=True)
        token_ids = torch.cat([token_ids, new], dim=1)
    return token_ids


def let_target_write(
    folder: Path,
    stream: NDArray[np.uint16],
    prompts: Sequence[NDArray[np.uint16]],
    config: DistillConfig,
    path: Path,
) -> NDArray[np.uint16]:
    """Rows the target wrote, uint16 [rows, sequence_length]; kept in `path`, so it happens once.

    It continues `prompts` and half as many windows of the corpus, in a random order, until they or
    the time run out. The two halves of a row belong to different prompts, because served texts are
    short. Drafts found in the target's own text make this three times faster.

    Args:
        folder: of the target.
    """
    if path.exists():
        rows: NDArray[np.uint16] = np.load(path)
        return rows
    half = config.sequence_length // 2
    windows = token_batch(
        stream, 0, max(2, len(prompts) // 2), config.prompt_length, config.seed + 1
    )[:, :-1]
    given = [prompt[-half // 2 :].tolist() for prompt in prompts] + windows.tolist()
    order = np.random.default_rng(config.seed).permutation(len(given)).tolist()
    engine = load_engine(folder, limits=EngineLimits(max_sessions=config.sample_batch))
    speculation = SpeculationConfig(method="suffix_decoding")
    palette, budget = config.temperatures, config.minutes * 60 * config.sample_share
    started = time.monotonic()
    sessions: list[Session] = []
    written: list[list[int]] = []
    bar = tqdm(desc="target writes", total=len(given), unit="text")
    while sessions or order:
        in_time = not written or time.monotonic() - started < budget
        while order and in_time and len(sessions) < config.sample_batch:
            i = order.pop()
            params = SamplingParams(
                max_tokens=half - len(given[i]), temperature=palette[i % len(palette)], seed=i,
                ignore_eos=True,
            )  # fmt: skip
            sessions.append(engine.submit(Request(given[i], params, speculation)))
        if not in_time:
            order.clear()
        engine.step()
        for session in [s for s in sessions if s.finished]:
            sessions.remove(session)
            written.append(session.token_ids)
            bar.update()
    bar.close()
    rows = np.array(written[: len(written) // 2 * 2], np.uint16).reshape(-1, 2 * half)
    with open(path.with_suffix(".tmp"), "wb") as file:
        np.save(file, rows)
    os.replace(path.with_suffix(".tmp"), path)
    return rows


@dataclass(frozen=True)
class TeacherCache:
    """The target's k most likely tokens after every token of some rows.

    The mass outside the k is 1 - sum.
    """

    rows: NDArray[np.uint16]  # [num_rows, length]
    token_ids: NDArray[np.uint16]  # [num_rows, length, k], most probable first
    probs: NDArray[np.float16]  # [num_rows, length, k]


@torch.no_grad()
def cache_teacher(
    target: LlamaForCausalLM, rows: NDArray[np.uint16], config: DistillConfig, folder: Path
) -> TeacherCache:
    """Run the target over `rows` until they or the time run out; resumes after a kill."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = (len(rows), rows.shape[1], config.top_k)
    state_path = folder / "state.json"
    state = {"rows": 0, "seconds": 0.0}
    mode: Literal["w+", "r+"] = "w+"
    if state_path.exists():
        state, mode = json.loads(state_path.read_text()), "r+"
    ids = np.memmap(folder / "token_ids.bin", dtype=np.uint16, mode=mode, shape=shape)
    probs = np.memmap(folder / "probs.bin", dtype=np.float16, mode=mode, shape=shape)

    def top_probs(hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(target.model.norm(hidden), target.model.embed_tokens.weight)
        top: tuple[Tensor, Tensor] = logits.float().softmax(-1).topk(config.top_k, dim=-1)
        return top

    compile_if_possible(target, top_probs)  # the layers; topk gains nothing
    bar = tqdm(desc="teacher", total=len(rows), initial=int(state["rows"]), unit="row")
    budget = config.minutes * 60 * config.cache_share
    while (done := int(state["rows"])) < len(rows) and (not done or state["seconds"] < budget):
        started = time.monotonic()
        chunk = rows[done : done + config.batch_size]
        # Pad the last chunk, so that no other shape is compiled.
        full = np.resize(chunk, (config.batch_size, rows.shape[1])).astype(np.int64)
        with torch.autocast(target.device.type, torch.bfloat16):
            hidden = layer_states(target, torch.from_numpy(full).to(target.device))[-1]
            values, indices = top_probs(hidden)
        end = done + len(chunk)
        ids[done:end] = indices[: len(chunk)].cpu().numpy().astype(np.uint16)
        probs[done:end] = values[: len(chunk)].cpu().numpy().astype(np.float16)
        state = {"rows": end, "seconds": state["seconds"] + time.monotonic() - started}
        bar.update(len(chunk))
        if end % 256 < config.batch_size or end == len(rows) or state["seconds"] >= budget:
            ids.flush()
            probs.flush()
            state_path.with_suffix(".tmp").write_text(json.dumps(state))
            os.replace(state_path.with_suffix(".tmp"), state_path)
    bar.close()
    done = int(state["rows"])
    return TeacherCache(rows[:done], ids[:done], probs[:done])


def build_drafter(
    target: LlamaForCausalLM, base: PretrainConfig, config: DistillConfig
) -> LlamaForCausalLM:
    """The untrained drafter: the target's first layers, with a wider FFN that changes nothing."""
    drafter = new_model(llama_config(base, config.num_layers, config.intermediate_size))
    weights, source = drafter.state_dict(), target.state_dict()
    with torch.no_grad():
        for name, weight in weights.items():
            given = source[name]
            if "down_proj" in name:
                weight.zero_()
            weight[tuple(slice(0, n) for n in given.shape)] = given
    return drafter


def distillation_loss(logits: Tensor, token_ids: Tensor, probs: Tensor) -> Tensor:
    """Distance of the drafter from the cached target, a scalar.

    `logits` float32 [n, vocab]; `token_ids` int64 [n, k]; `probs` float32 [n, k]. The sum of the
    forward KL, the total variation (1 - TV is the acceptance rate of rejection sampling) and the
    cross entropy on the target's argmax (its match is the acceptance rate at temperature 0). The
    vocabulary outside the k cached tokens counts as one event.
    """
    log_q = logits.log_softmax(-1)
    log_q_k = log_q.gather(1, token_ids)
    q_k = log_q_k.exp()
    rest_p = (1.0 - probs.sum(-1)).clamp_min(0.0)
    rest_q = (1.0 - q_k.sum(-1)).clamp_min(1e-5)
    kl = -(probs * log_q_k).sum(-1) - rest_p * rest_q.log()
    total_variation = 0.5 * ((probs - q_k).abs().sum(-1) + (rest_p - rest_q).abs())
    hard = -log_q_k[:, 0]
    return (0.4 * kl + 0.4 * hard + 0.6 * total_variation).mean()


def distill(
    target: LlamaForCausalLM,
    base: PretrainConfig,
    config: DistillConfig,
    stream: NDArray[np.uint16],
    prompts: Sequence[NDArray[np.uint16]],
    folder: Path,
    work: Path,
    start: LlamaForCausalLM | None = None,
) -> Trained:
    """Distil a drafter from `target`; resumable from `work`.

    Args:
        stream: the corpus, uint16 [num_tokens].
        prompts: texts that the target continues, uint16 [num_tokens] each.
        folder: folder of the exported target.
        start: a drafter to train further; without one it starts as the target's first layers.
    """
    torch.manual_seed(config.seed)
    # The teacher is what ships: the weights rounded to bfloat16.
    weights = {name: weight.bfloat16() for name, weight in target.state_dict().items()}
    shipped = new_model(target.config, weights)
    written = let_target_write(folder, stream, prompts, config, work / "sampled.npy")
    count = len(stream) // config.sequence_length
    corpus = stream[: count * config.sequence_length].reshape(count, config.sequence_length)
    order = np.random.default_rng(config.seed).permutation(count)
    cache = cache_teacher(shipped, np.concatenate([written, corpus[order]]), config, work / "cache")
    drafter = (build_drafter(target, base, config) if start is None else start).train()
    spent = config.sample_share + config.cache_share
    trainer = Trainer(
        work / "drafter.pt", drafter, build_optimizers(drafter, config.muon_lr, config.adamw_lr),
        minutes=config.minutes * (1 - spent), max_steps=config.max_steps, warmup=0.02,
        checkpoint_seconds=config.checkpoint_seconds, label="drafter",
    )  # fmt: skip
    head, norm = drafter.model.embed_tokens, drafter.model.norm

    def read_out(hidden: Tensor, token_ids: Tensor, probs: Tensor) -> Tensor:
        logits = F.linear(norm(hidden), head.weight).flatten(0, 1).float()
        return distillation_loss(logits, token_ids, probs)

    read_out = compile_if_possible(drafter, read_out)
    own = np.arange(min(len(written), len(cache.rows)))
    seen = np.concatenate([np.arange(len(cache.rows))] + [own] * (config.sampled_repeats - 1))

    def loss_of_step(step: int, progress: float) -> tuple[Tensor, float, int]:
        first = step * config.batch_size
        picked = []
        for i in range(first, first + config.batch_size):
            epoch, index = divmod(i, len(seen))
            picked.append(np.random.default_rng([config.seed, epoch]).permutation(seen)[index])
        device = drafter.device
        rows = torch.from_numpy(cache.rows[picked].astype(np.int64)).to(device)
        ids = torch.from_numpy(cache.token_ids[picked].astype(np.int64)).to(device).flatten(0, 1)
        probs = torch.from_numpy(cache.probs[picked].astype(np.float32)).to(device).flatten(0, 1)
        with torch.autocast(device.type, torch.bfloat16):
            loss = read_out(layer_states(drafter, rows)[-1], ids, probs)
        return loss, float(loss.detach()), rows.numel()

    trainer.run(loss_of_step)
    return Trained.of(trainer, drafter)


@dataclass(frozen=True)
class HeldOutAcceptance:
    """How well a drafter predicts its target, on one source of held-out text."""

    agreement: float
    """Share of positions of the held-out text where both have the same argmax."""
    overlap: float
    """1 - TV, the mean acceptance rate of rejection sampling at temperature 1, on the same text."""
    written_agreement: float
    """`agreement` on text that the target wrote greedily after held-out prompts."""
    tau: float
    """Mean accepted length, next token included, of greedy chains of `GAMMA` on that text."""
    repetition: float
    """Share of that text's tokens that end a run of 8 seen before in the same text or prompt."""


GAMMA = 5


@torch.no_grad()
def measure_acceptance(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, rows: Tensor, prompt: int = 128
) -> HeldOutAcceptance:
    """Compare two models in evaluation mode on held-out `rows`, int64 [num_rows, length].

    τ is exact, not an estimate: up to its first miss, a greedy draft continues the same text that
    the target writes, so the matches at each position of that text decide every round.
    """
    agree, overlap = [], []
    for chunk in torch.split(rows, 4):
        p = target(chunk).logits.float().softmax(-1)
        q = drafter(chunk).logits.float().softmax(-1)
        agree.append((p.argmax(-1) == q.argmax(-1)).float().mean())
        overlap.append(torch.minimum(p, q).sum(-1).mean())
    prompts = rows[:32, :prompt]
    greedy = torch.zeros(len(prompts), device=rows.device)
    text = sample_text(target, prompts, 2 * prompt, greedy, seed=0)
    matches = drafter(text[:, :-1]).logits.argmax(-1)[:, prompt - 1 :] == text[:, prompt:]
    rounds = committed = 0
    for row in matches.tolist():
        position = 0
        while position + GAMMA < len(row):
            accepted = 0
            while accepted < GAMMA and row[position + accepted]:
                accepted += 1
            rounds, committed = rounds + 1, committed + accepted + 1
            position += accepted + 1
    repeated = 0
    for row in text.tolist():
        runs = [tuple(row[i - 7 : i + 1]) for i in range(7, len(row))]
        repeated += sum(run in runs[:i] for i, run in enumerate(runs) if i + 7 >= prompt)
    return HeldOutAcceptance(
        float(torch.stack(agree).mean()),
        float(torch.stack(overlap).mean()),
        float(matches.float().mean()),
        committed / max(rounds, 1),
        repeated / matches.numel(),
    )
