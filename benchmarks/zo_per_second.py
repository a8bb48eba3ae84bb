"""What zeroth-order training learns per GPU second: estimators on a model that is resident on one device.

    python -m benchmarks.zo_per_second run --out ROWS --model FOLDER --data-root DATA --wall-s 230
    python -m benchmarks.zo_per_second run --out ROWS --tasks code_or_text --size 0.01 --num-eval 32
    python -m benchmarks.zo_per_second table ROWS

Successive halving: every variant trains for `--short-s` seconds on the first task at two learning rates. The two best
and MeZO train for `--long-s` seconds. The winner and MeZO train on all tasks with several seeds. Dev chooses, test
reports. A repeated command skips the runs that have a row.

Seconds are those of training steps, without evaluation. They are fair only if each run has the GPU for itself.
`step_ms`, the shortest and the longest mean of a series of steps, shows if another process shared it.

[Note: noise outside the weights] Rank-1 noise needs no perturbed weights: y = x W^T + eps (x a_k) b_k^T. Each sequence
of a batch can have a direction k of its own, so many directions are one pass. The update is sum_k c_k b_k a_k^T, one
product. A pass has `groups * directions * examples` sequences, twice as many if two-sided: each of `groups` sets of
examples is seen by `directions` directions of its own.

Sources: MeZO, arXiv 2305.17333. FZOO, arXiv 2506.09034. EGGROLL, arXiv 2511.16652: low-rank noise outside the weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_zo.records.environment import commit, versions
from ds_zo.records.rows import Row, append_row, read_objects, table_lines
from ds_zo.tasks import ChoiceTask, DataSource, Encoded, Evaluator, Task, make_task, pad_token_id
from ds_zo.tasks.embedded_model import folder_of
from ds_zo.tasks.encoding import IGNORED, encode_answer
from ds_zo.tasks.score import sign_of

NUM_BUCKETS = 8
MAX_LENGTH = 128
"""As in the grid `accuracy` of `launch/sweep.py`."""
LORA_RANK = 8


@dataclass(frozen=True)
class Settings:
    """One run: the estimator, the step and the task."""

    name: str
    lr: float
    task: str = "sst2"
    seed: int = 0
    seconds: float = 2.0
    space: Literal["full", "rank1", "lora"] = "rank1"
    """full: noise in every weight, one direction after the other, all on the same examples. rank1: noise in every
    Linear, outside the weights. lora: noise in the factors of a LoRA."""
    loss: Literal["lm", "choice"] = "choice"
    """lm: negative log-likelihood of the right answer, which `ds-zo train` minimises. choice: cross-entropy between the
    answers, as in MeZO's own scripts for classification. A task without options has lm."""
    groups: int = 1
    directions: int = 1
    examples: int = 1
    two_sided: bool = True
    """False: the loss is compared with that of the weights without noise (full), or with the mean of the other
    directions on the same examples (rank1, lora)."""
    rademacher: bool = False
    normalise: bool = True
    """The step is divided by the standard deviation of what the directions measured."""
    eps: float = 3e-3
    """With 1e-3, bf16's rounding of activations changes a measured derivative as much as the noise does."""
    cosine: bool = False
    evals: int = 2

    @property
    def num_directions(self) -> int:
        return self.groups * self.directions

    @property
    def num_sequences(self) -> int:
        """Sequences of a step, of one option each."""
        if self.space == "full" and not self.two_sided:
            return (self.directions + 1) * self.examples
        return self.num_directions * self.examples * (2 if self.two_sided else 1)


MEZO = "mezo-b16"
_FULL: dict[str, Any] = {"space": "full", "examples": 16, "normalise": False}
_FZOO = _FULL | {"directions": 8, "two_sided": False, "rademacher": True, "normalise": True}
VARIANTS: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "rank1-512": ({"groups": 512}, (0.01, 0.04)),
    MEZO: (_FULL, (1e-5, 4e-5)),
    "rank1-one-sided": ({"groups": 128, "directions": 8, "two_sided": False}, (0.015, 0.06)),
    "mezo-b8-lm": (_FULL | {"loss": "lm", "examples": 8}, (1e-5, 2e-5)),
    "mezo-b64": (_FULL | {"examples": 64}, (1e-5, 4e-5)),
    "mezo-n4": (_FULL | {"directions": 4}, (5e-5, 2e-4)),
    "mezo-n16": (_FULL | {"directions": 16}, (2e-4, 8e-4)),
    "fzoo-n8": (_FZOO, (1e-3, 4e-3)),
    "rank1-512-lm": ({"groups": 512, "loss": "lm"}, (0.01, 0.04)),
    "rank1-64x8": ({"groups": 64, "examples": 8}, (0.004, 0.016)),
    "rank1-16x16": ({"groups": 16, "examples": 16}, (0.0015, 0.006)),
    "lora-512": ({"space": "lora", "groups": 512, "eps": 2e-2}, (0.05, 0.2)),
}
"""Settings of each variant, and the learning rates to try, in the order of the runs. [Note: rates] N directions with
coefficients c move a weight by about r * c * sqrt(N), where r is the rate of one direction. Rates of short runs make
this about 0.01, a fifth of a weight's size: further away the model loses what it knew. So the rate of a step is
proportional to the square root of its directions, and to that of the run's seconds, inverted."""


AddNoise = Callable[[str, Tensor, Tensor], Tensor]
"""Given a Linear's name, input and output: the output with noise."""


class Llama:
    """The forward of a Llama or Qwen2 model on plain tensors. Projections with the same input are one Linear.

    `master` has the float32 weights, `weights` the copies that a forward reads; both are views of one flat tensor, so
    that one kernel changes all weights. Sequences are padded on the right: a causal model needs no mask for that.
    """

    def __init__(self, model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        config = model.config
        self.num_layers, self.hidden = config.num_hidden_layers, config.hidden_size
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or self.hidden // self.num_heads
        self.norm_eps = config.rms_norm_eps
        self.device, self.dtype = device, dtype
        state = model.state_dict()
        self.sources = {"embed": ["model.embed_tokens.weight"], "norm": ["model.norm.weight"]}
        """Names in the model's `state_dict` of the tensors that make up each of `weights`."""
        for i in range(self.num_layers):
            at = f"model.layers.{i}."
            self.sources[f"{i}.qkv"] = [f"{at}self_attn.{p}_proj.weight" for p in "qkv"]
            if f"{at}self_attn.q_proj.bias" in state:
                self.sources[f"{i}.qkv.bias"] = [f"{at}self_attn.{p}_proj.bias" for p in "qkv"]
            self.sources[f"{i}.o"] = [at + "self_attn.o_proj.weight"]
            self.sources[f"{i}.gate_up"] = [f"{at}mlp.{p}_proj.weight" for p in ("gate", "up")]
            self.sources[f"{i}.down"] = [at + "mlp.down_proj.weight"]
            self.sources[f"{i}.norm1"] = [at + "input_layernorm.weight"]
            self.sources[f"{i}.norm2"] = [at + "post_attention_layernorm.weight"]
        named = {name: torch.cat([state[source] for source in found]) for name, found in self.sources.items()}
        self.pristine = torch.cat([t.flatten().float() for t in named.values()]).to(device)
        self.flat_master, self.flat_weights = self.pristine.clone(), self.pristine.to(dtype, copy=True)
        sizes = [t.numel() for t in named.values()]
        self.master, self.weights = (
            {name: part.view(t.shape) for (name, t), part in zip(named.items(), flat.split(sizes), strict=True)}
            for flat in (self.flat_master, self.flat_weights)
        )
        theta = config.rope_parameters["rope_theta"]
        self.inv_freq = theta ** (-torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim)

    def reset(self) -> None:
        self.flat_master.copy_(self.pristine)
        self.flat_weights.copy_(self.pristine)

    @torch.no_grad()
    def copy_to(self, state: Mapping[str, Tensor], added: Callable[[str], Tensor | None]) -> None:
        """Copies the float32 weights to a `state_dict` of the model, with what `added` returns for a Linear's name."""
        for name, found in self.sources.items():
            delta = added(name)
            values = self.master[name] if delta is None else self.master[name] + delta
            for source, part in zip(found, values.split([len(state[source]) for source in found]), strict=True):
                state[source].copy_(part)

    def linear_names(self) -> list[str]:
        return [f"{i}.{kind}" for i in range(self.num_layers) for kind in ("qkv", "o", "gate_up", "down")]

    def linear(self, name: str, x: Tensor, noise: AddNoise | None, *, onto: Tensor | None = None) -> Tensor:
        """The Linear's output, added to `onto`."""
        weight = self.weights[name]
        if onto is None:
            y = F.linear(x, weight, self.weights.get(name + ".bias"))
        else:
            y = torch.addmm(onto.flatten(0, 1), x.flatten(0, 1), weight.T).view_as(onto)
        return y if noise is None else noise(name, x, y)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[name], self.norm_eps)

    def hidden_states(self, ids: Tensor, noise: AddNoise | None = None) -> Tensor:
        """Outputs of the last layer, before the last norm."""
        x = F.embedding(ids, self.weights["embed"])
        num, length = ids.shape
        angles = torch.arange(length, device=x.device).float()[:, None, None] * self.inv_freq
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        for i in range(self.num_layers):
            mixed = self.linear(f"{i}.qkv", self.norm(f"{i}.norm1", x), noise).view(num, length, -1, self.head_dim)
            turned, v = mixed.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=2)
            left, right = turned.chunk(2, dim=-1)
            turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
            q, k = turned.transpose(1, 2).split((self.num_heads, self.num_kv_heads), dim=1)
            seen = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
            x = self.linear(f"{i}.o", seen.transpose(1, 2).reshape(num, length, -1), noise, onto=x)
            gate, up = self.linear(f"{i}.gate_up", self.norm(f"{i}.norm2", x), noise).chunk(2, dim=-1)
            x = self.linear(f"{i}.down", F.silu(gate) * up, noise, onto=x)
        return x


@dataclass
class Bucket:
    """Examples padded to one length."""

    ids: Tensor
    """[examples, options, length]"""
    positions: Tensor
    """[examples, options, targets]: the positions that predict a target."""
    targets: Tensor
    """[examples, options, targets]: token ids, or IGNORED."""
    answers: Tensor
    """[examples]: the index of the right option."""
    candidates: Tensor | None
    """[examples, answers]: one-token answers to one prompt. The prompt is then the only option."""

    def take(self, chosen: Tensor) -> Bucket:
        ids, positions, targets, answers = (t[chosen] for t in (self.ids, self.positions, self.targets, self.answers))
        return Bucket(ids, positions, targets, answers, None if self.candidates is None else self.candidates[chosen])


def make_buckets(task: Task, tokenizer: Any, *, loss: str, device: torch.device) -> list[Bucket]:
    """Sorts the training examples by length into buckets of equal size."""
    if isinstance(task, ChoiceTask):
        choices = task.choices("train")
        rows = [[encode_answer(tokenizer, c.prompt, o, max_length=MAX_LENGTH) for o in c.options] for c in choices]
        answers = [c.answer for c in choices]
    else:
        rows = [[sequence] for sequence in task.sequences("train", tokenizer, max_length=MAX_LENGTH)]
        answers = [0] * len(rows)
    one_token = isinstance(task, ChoiceTask) and all(map(_one_token, rows))
    if loss == "lm" and not one_token:
        rows, answers = [[row[a]] for row, a in zip(rows, answers, strict=True)], [0] * len(rows)

    def bucket_of(chosen: list[int]) -> Bucket:
        part = [rows[i][:1] if one_token else rows[i] for i in chosen]
        ids = [[o.input_ids[: len(o.input_ids) - one_token] for o in row] for row in part]
        where = [[[p - 1 for p, t in enumerate(o.labels) if t != IGNORED and p] for o in row] for row in part]
        targets = [[[t for t in o.labels[1:] if t != IGNORED] for o in row] for row in part]
        candidates = torch.tensor([[o.input_ids[-1] for o in rows[i]] for i in chosen], device=device)
        return Bucket(
            ids=_padded(ids, pad_token_id(tokenizer), multiple=4).to(device),
            positions=_padded(where, 0).to(device),
            targets=_padded(targets, IGNORED).to(device),
            answers=torch.tensor([answers[i] for i in chosen], device=device),
            candidates=candidates if one_token else None,
        )

    order = sorted(range(len(rows)), key=lambda i: max(len(o.input_ids) for o in rows[i]))
    size = -(-len(order) // NUM_BUCKETS)
    return [bucket_of(order[start : start + size]) for start in range(0, len(order), size)]


def _one_token(options: Sequence[Encoded]) -> bool:
    """Whether the options differ only in their last token, the only one with a label."""
    return len({tuple(o.input_ids[:-1]) for o in options}) == 1 and all(
        label == IGNORED for o in options for label in o.labels[:-1]
    )


def _padded(rows: list[list[list[int]]], filler: int, *, multiple: int = 1) -> Tensor:
    length = -(-max(len(o) for row in rows for o in row) // multiple) * multiple
    return torch.tensor([[o + [filler] * (length - len(o)) for o in row] for row in rows])


def losses_of(model: Llama, batch: Bucket, noise: AddNoise | None, *, loss: str) -> Tensor:
    """The loss of each example, in float32."""
    num, options = batch.ids.shape[:2]
    hidden = model.hidden_states(batch.ids.flatten(0, 1), noise)
    where = batch.positions.flatten(0, 1)
    hidden = model.norm("norm", hidden.gather(1, where[..., None].expand(-1, -1, model.hidden)))
    if batch.candidates is not None and loss == "choice":
        scores = (hidden[:, :1].float() * model.weights["embed"][batch.candidates].float()).sum(-1)
        return F.cross_entropy(scores, batch.answers, reduction="none")
    logits = (hidden @ model.weights["embed"].T).float()
    if batch.candidates is not None:
        right = batch.candidates.gather(1, batch.answers[:, None])[:, 0]
        return F.cross_entropy(logits[:, 0], right, reduction="none")
    targets = batch.targets.flatten(0, 1)
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    nats, counts = nats.view(targets.shape).sum(1), (targets != IGNORED).sum(1)
    if options == 1:  # long answers weigh more, as in the mean over a batch's tokens
        return nats / counts.float().mean()
    return F.cross_entropy(-(nats / counts).view(num, options), batch.answers, reduction="none")


def random_(z: Tensor, settings: Settings) -> Tensor:
    return z.bernoulli_(0.5).mul_(2).sub_(1) if settings.rademacher else z.normal_()


class Noise:
    """The noise of all directions of one pass ([Note: noise outside the weights]), and a LoRA's factors if it perturbs
    these. The first sequences of a pass have the noise of direction 0, the last ones that of the last direction. The
    second half of a two-sided pass has the opposite sign."""

    def __init__(self, model: Llama, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.names = model.linear_names()
        self.rank = LORA_RANK if settings.space == "lora" else 1
        shapes = [tuple(model.master[name].shape) for name in self.names]
        ends = list(itertools.accumulate(self.rank * (m + n) for m, n in shapes))
        self.spans = dict(zip(self.names, itertools.pairwise([0, *ends]), strict=True))
        self.factors: Tensor | None = None
        """All factors of the LoRA, flat, in float32: A of the first Linear, its B, A of the second ..."""
        if settings.space == "lora":
            parts = [(torch.randn(n * self.rank) / n**0.5, torch.zeros(m * self.rank)) for m, n in shapes]
            self.factors = torch.cat([factor for part in parts for factor in part]).to(model.device)
        sides = (1.0, -1.0) if settings.two_sided else (1.0,)
        signs = torch.tensor(sides, dtype=model.dtype).repeat_interleave(settings.num_directions) * settings.eps
        self.signs = signs.to(model.device)[:, None]
        self.z = self.used = torch.empty(0)

    def product(self, name: str) -> Tensor | None:
        """What the LoRA adds to a weight; None if it adds nothing."""
        if self.factors is None or name not in self.spans:
            return None
        a, b = self._pair(name, self.factors)
        return b @ a.T

    def draw(self) -> None:
        shape = (self.settings.num_directions, self.spans[self.names[-1]][1])
        self.z = random_(torch.empty(shape, device=self.model.device, dtype=self.model.dtype), self.settings)
        self.used = torch.cat((self.z, self.z)) if self.settings.two_sided else self.z

    def _pair(self, name: str, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of a Linear, [..., n, rank] and [..., m, rank], in `flat`, whose last dimension has all."""
        m, n = self.model.master[name].shape
        a, b = flat[..., slice(*self.spans[name])].split((n * self.rank, m * self.rank), dim=-1)
        return a.unflatten(-1, (n, self.rank)), b.unflatten(-1, (m, self.rank))

    def added(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """The output `y` of a Linear with the noise of each sequence's direction. Changes `y`."""
        a, b = self._pair(name, self.used)
        by_direction = x.reshape(len(self.signs), -1, x.shape[-1])
        grouped = y.view(len(self.signs), -1, y.shape[-1])
        if self.factors is None:
            inner = torch.bmm(by_direction, a) * self.signs[..., None]
            return grouped.addcmul_(inner, b.transpose(1, 2)).view_as(y)
        base_a, base_b = self._pair(name, self.factors.to(x.dtype))
        a = torch.addcmul(base_a, a, self.signs[..., None])
        b = torch.addcmul(base_b, b, self.signs[..., None])
        return grouped.baddbmm_(torch.bmm(by_direction, a), b.transpose(1, 2)).view_as(y)

    def update(self, coefficients: Tensor) -> None:
        """Adds sum_k coefficients[k] * z_k to the weights or the factors. Coefficients hold the rate and its sign."""
        if self.factors is not None:
            self.factors.add_((coefficients.to(self.z.dtype) @ self.z).float())
            return
        for name in self.names:
            a, b = (part[..., 0].float() for part in self._pair(name, self.z))
            self.model.master[name].addmm_((b * coefficients[:, None]).T, a)
        self.model.flat_weights.copy_(self.model.flat_master)


def coefficients_of(losses: Tensor, settings: Settings) -> Tensor:
    """The estimated derivative along each direction, from `losses` of shape [signs, directions]."""
    if settings.two_sided:
        return (losses[0] - losses[1]) / (2 * settings.eps)
    by_group = losses[0].view(settings.groups, settings.directions)
    factor = settings.directions / (settings.directions - 1)  # makes the mean that of the group's other losses
    return ((by_group - by_group.mean(1, keepdim=True)) * (factor / settings.eps)).flatten()


class Step:
    """One training step on tensors that stay in place, so that a CUDA graph can repeat it."""

    def __init__(self, model: Llama, noise: Noise, settings: Settings) -> None:
        self.model, self.noise, self.settings = model, noise, settings
        self.lr, self.loss = (torch.zeros((), device=model.device) for _ in range(2))

    @torch.no_grad()
    def __call__(self, bucket: Bucket) -> None:
        s = self.settings
        chosen = torch.randint(len(bucket.ids), (s.groups, 1, s.examples), device=self.model.device)
        if s.space == "full":
            self._full(bucket.take(chosen.flatten()))
            return
        chosen = chosen.expand(-1, s.directions, -1).flatten()
        batch = bucket.take(torch.cat((chosen, chosen)) if s.two_sided else chosen)
        self.noise.draw()
        losses = losses_of(self.model, batch, self.noise.added, loss=s.loss)
        losses = losses.view(-1, s.num_directions, s.examples).mean(-1)
        self.loss.copy_(losses.mean())
        c = coefficients_of(losses, s)
        if s.normalise:
            c = c / c.square().mean().sqrt().clamp(min=1e-12)
        self.noise.update(c * (-self.lr / len(c)))

    def _full(self, batch: Bucket) -> None:
        s, master, weights = self.settings, self.model.flat_master, self.model.flat_weights
        base = None if s.two_sided else losses_of(self.model, batch, None, loss=s.loss).mean()
        total = torch.zeros((), device=master.device)
        found: list[Tensor] = []
        for _ in range(s.directions):
            z = random_(torch.empty_like(master), s)
            sides = []
            for sign in (1, -1) if s.two_sided else (1,):
                torch.add(master, z, alpha=sign * s.eps, out=weights)
                sides.append(losses_of(self.model, batch, None, loss=s.loss).mean())
            c = (sides[0] - sides[1]) / (2 * s.eps) if base is None else (sides[0] - base) / s.eps
            found.append(sides[0])
            total = z.mul_(c) if len(found) == 1 else total.addcmul_(z, c)
        self.loss.copy_(torch.stack(found).mean())
        # FZOO divides the mean of (l_i - l_0) / eps * z_i by the standard deviation of the l_i.
        divisor = torch.stack(found).std().clamp(min=1e-12) / s.eps if s.normalise else 1.0
        master.addcmul_(total, -self.lr / (s.directions * divisor))
        weights.copy_(master)


class Study:
    """Runs settings on one model, and appends a row for each."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.began, self.args, self.device = time.perf_counter(), args, torch.device(args.device)
        self.is_cuda, self.use_graphs = self.device.type == "cuda", args.graphs
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape
        self.tokenizer = AutoTokenizer.from_pretrained(folder_of(args.model))
        loaded = AutoModelForCausalLM.from_pretrained(folder_of(args.model), dtype=torch.float32)
        self.model = Llama(loaded, device=self.device, dtype=torch.bfloat16 if self.is_cuda else torch.float32)
        self.scored = loaded.to(self.device).eval()
        """The model of transformers, which scores the trained weights in float32."""
        self.facts: Row = {
            "command": " ".join(sys.argv),
            "model": Path(args.model).name,
            "device": torch.cuda.get_device_name() if self.is_cuda else "cpu",
            "versions": versions(),
            "commit": commit(),
        }
        rows = read_objects(args.out) if args.out.exists() else []
        self.done = {_key(row): row for row in rows if "curve" in row}
        self.zero_shot: dict[str, list[tuple[str, float]]] = {}

    def task(self, name: str) -> Task:
        root: Path | None = self.args.data_root
        return make_task(name, DataSource(folder=root / name if root else None))

    def buckets(self, task: str, loss: str) -> list[Bucket]:
        return make_buckets(self.task(task), self.tokenizer, loss=loss, device=self.device)

    def run(self, settings: Settings) -> Row | None:
        """The row of a run, or None if the time of the study does not suffice."""
        config = {"config": asdict(settings)}
        if (row := self.done.get(_key(config))) is not None:
            return row
        start = time.perf_counter()
        if start - self.began + settings.seconds + 2 > self.args.wall_s:
            return None
        try:
            row = self.facts | config | self._trained(settings)
        except RuntimeError as error:  # a lack of memory is a result; a failed capture must not end the study
            if not self.done:
                raise
            row = self.facts | config | {"error": str(error).splitlines()[0]}
            self.use_graphs &= isinstance(error, torch.OutOfMemoryError)
        row["wall_s"] = time.perf_counter() - start
        append_row(self.args.out, row)
        self.done[_key(row)] = row
        print(" ".join(_cells(row)), flush=True)
        return row

    def _now(self) -> float:
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _score(self, task: Task, split: Literal["dev", "test"], noise: Noise) -> tuple[str, float]:
        self.model.copy_to(self.scored.state_dict(), noise.product)
        evaluator = Evaluator(self.scored, self.device, pad_token_id(self.tokenizer), batch_size=64)
        found = task.evaluate(evaluator, split, self.tokenizer, max_length=MAX_LENGTH, num_examples=self.args.num_eval)
        return found.metric, found.value

    def _trained(self, s: Settings) -> Row:
        """Trains the pristine model for `seconds`."""
        self.model.reset()
        if self.is_cuda:
            torch.cuda.empty_cache()  # the memory of the last run's graphs
        torch.manual_seed(s.seed)
        task, buckets, noise = self.task(s.task), self.buckets(s.task, s.loss), Noise(self.model, s)
        step = Step(self.model, noise, s)
        if s.task not in self.zero_shot:
            self.zero_shot[s.task] = [self._score(task, split, noise) for split in ("dev", "test")]
        (metric, dev), (_, test) = self.zero_shot[s.task]
        replays = self._on_graphs(step, buckets)
        order = torch.Generator().manual_seed(s.seed)
        best: dict[str, float] = {"seconds": 0.0, "steps": 0, "dev": dev, "test": test}
        curve = [best]
        seconds, steps, num = 0.0, 0, 2
        series: list[float] = []
        for index in range(1, s.evals + 1):
            end = s.seconds * index / s.evals
            while seconds < end:
                began = self._now()
                for i in range(num):
                    share = min(1.0, (seconds + (i * series[-1] if series else 0.0)) / s.seconds)
                    step.lr.fill_(s.lr * (0.5 + 0.5 * math.cos(math.pi * share) if s.cosine else 1.0))
                    replays[int(torch.randint(len(replays), (), generator=order))]()
                spent = self._now() - began
                series.append(spent / num)
                seconds, steps = seconds + spent, steps + num
                num = max(1, math.ceil(min(0.25, end - seconds) / series[-1]))
            dev, loss = self._score(task, "dev", noise)[1], step.loss.item()
            curve.append({"seconds": seconds, "steps": steps, "dev": dev, "loss": loss})
            if not math.isfinite(loss):
                break
            if sign_of(metric) * dev > sign_of(metric) * best["dev"]:
                best = curve[-1]
                best["test"] = self._score(task, "test", noise)[1]
        tokens_per_s = s.num_sequences * steps * _tokens(buckets) / seconds
        linear_numel = sum(self.model.master[name].numel() for name in noise.names)
        return {
            "metric": metric,
            "best": best,
            "late_dev": sum(point["dev"] for point in curve[-2:]) / 2,
            "curve": curve,
            "step_ms": [1e3 * min(series[1:] or series), 1e3 * max(series[1:] or series)],
            "tokens_per_s": tokens_per_s,
            "tflops": 2e-12 * linear_numel * tokens_per_s,
            "graphs": self.use_graphs and self.is_cuda,
        }

    def _on_graphs(self, step: Step, buckets: Sequence[Bucket]) -> list[Callable[[], None]]:
        """The step on each bucket: CUDA graphs on a GPU, plain calls elsewhere. The rate is 0 meanwhile."""
        if not (self.is_cuda and self.use_graphs):
            return [lambda bucket=bucket: step(bucket) for bucket in buckets]  # type: ignore[misc]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for bucket in buckets:
                step(bucket)
        torch.cuda.synchronize()
        pool, replays = torch.cuda.graph_pool_handle(), []
        for bucket in buckets:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                step(bucket)
            replays.append(graph.replay)
        return replays


def study(s: Study) -> None:
    """All runs, in the order of their worth."""
    args = s.args
    first = args.tasks[0]

    def late(row: Row | None) -> float:
        learnt = row and "curve" in row and math.isfinite(row["late_dev"])
        return sign_of(row["metric"]) * row["late_dev"] if row and learnt else -math.inf

    short: dict[str, tuple[float, Settings]] = {}  # the better rate's score and settings
    for name, (changes, rates) in VARIANTS.items():
        base = Settings(name, 0.0, task=first, seconds=args.short_s, **changes)
        groups = max(1, round(base.groups * args.size))
        both = [replace(base, groups=groups, lr=lr * math.sqrt(groups / base.groups)) for lr in rates]
        short[name] = max(((late(s.run(settings)), settings) for settings in both), key=lambda pair: pair[0])
    ranked = sorted(short, key=lambda name: -short[name][0])
    print("after the short runs:", " ".join(f"{name} {short[name][0]:.3f}" for name in ranked), flush=True)

    def longer(name: str, task: str, seconds: float, seed: int = 0, factor: float = 1.0) -> Row | None:
        settings = short[name][1]
        lr = factor * settings.lr * math.sqrt(args.short_s / seconds)
        if task != first and settings.space != "full":  # as many tokens in a pass
            shrink = _tokens(s.buckets(first, settings.loss)) / _tokens(s.buckets(task, settings.loss))
            groups = max(1, round(settings.groups * shrink))
            lr, settings = lr * math.sqrt(groups / settings.groups), replace(settings, groups=groups)
        return s.run(replace(settings, task=task, seconds=seconds, seed=seed, lr=lr, cosine=True, evals=6))

    finalists = [*[name for name in ranked if name != MEZO][:2], MEZO]
    results = {name: late(longer(name, first, args.long_s)) for name in finalists}
    rival = max(finalists[:-1], key=results.__getitem__)
    if results[rival] < args.target:
        longer(rival, first, args.reach_s)
    factors: dict[tuple[str, str], float] = {}
    for seed in range(args.seeds):
        for task, name in itertools.product(args.tasks, (rival, MEZO)):
            seconds = args.long_s if task == first else args.task_s
            if seed:
                longer(name, task, seconds, seed, factors[task, name])
                continue
            # the size of MeZO's steps depends on the task's derivatives
            tried = (1.0,) if task == first or short[name][1].normalise else (1.0, 0.3)
            scores = {factor: late(longer(name, task, seconds, factor=factor)) for factor in tried}
            factors[task, name] = max(scores, key=scores.__getitem__)


def _key(row: Row) -> str:
    return json.dumps(row["config"], sort_keys=True)


def _tokens(buckets: Sequence[Bucket]) -> float:
    """Tokens of an example with all its options, with padding."""
    return sum(b.ids.shape[1] * b.ids.shape[2] for b in buckets) / len(buckets)


HEADS = ["run", "task", "seed", "s", "lr", "ms a step", "TFLOP/s", "zero-shot", "dev over time", "best at s", "test"]


def _cells(row: Row) -> list[str]:
    c = row["config"]
    cells = [c["name"], c["task"], str(c["seed"]), f"{c['seconds']:g}", f"{c['lr']:.2g}"]
    if "error" in row:
        return [*cells, row["error"], *[""] * (len(HEADS) - 6)]
    best, curve = row["best"], row["curve"]
    cells += [" to ".join(f"{ms:.1f}" for ms in row["step_ms"]), f"{row['tflops']:.0f}", f"{curve[0]['test']:.3f}"]
    return [*cells, " ".join(f"{p['dev']:.3f}" for p in curve), f"{best['seconds']:.1f}", f"{best['test']:.3f}"]


def _means(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Test scores of the longer runs over seeds: mean, lowest and highest."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "curve" in row and row["config"]["cosine"]:
            found.setdefault(tuple(row["config"][key] for key in ("task", "name", "seconds", "lr")), []).append(row)
    for (task, name, seconds, lr), runs in found.items():
        tests = [row["best"]["test"] for row in runs]
        numbers = [runs[0]["curve"][0]["test"], sum(tests) / len(tests), min(tests), max(tests)]
        yield [task, name, f"{seconds:g}", f"{lr:.2g}", str(len(runs)), *(f"{number:.3f}" for number in numbers)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train and append rows")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--model", default="embedded", help='a folder, or "embedded"')
    running.add_argument("--data-root", type=Path, help="a folder with a folder for each task")
    running.add_argument("--tasks", nargs="+", default=["sst2", "rte", "alpaca", "boolq", "copa"])
    seconds = {"short": 1.5, "long": 8.0, "task": 4.0, "reach": 40.0, "wall": math.inf}
    for name, default in seconds.items():
        running.add_argument(f"--{name}-s", type=float, default=default)
    running.add_argument(
        "--target", type=float, default=0.8, help="if no long run reaches it, one has --reach-s seconds"
    )
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--size", type=float, default=1.0, help="factor of the number of groups, for a rehearsal")
    running.add_argument("--num-eval", type=int, help="rows of dev and test to score; all if not given")
    running.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    running.add_argument("--graphs", default=True, action=argparse.BooleanOptionalAction, help="CUDA graphs of steps")
    showing = commands.add_parser("table", help="show rows")
    showing.add_argument("rows", type=Path)
    return parser


def main() -> None:
    args = _parser().parse_args()
    if args.command == "run":
        study(Study(args))
    else:
        rows = read_objects(args.rows)
        heads = ["task", "run", "s", "lr", "seeds", "zero-shot", "mean", "lowest", "highest"]
        print("\n".join([*table_lines(HEADS, map(_cells, rows)), "", *table_lines(heads, _means(rows))]))


if __name__ == "__main__":
    main()
