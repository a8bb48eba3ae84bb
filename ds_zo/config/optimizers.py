"""Models of `optimizer.params`, one for each backend. The text under a field is its meaning in the key reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from typing_extensions import Self

from ds_zo.config.base import ConfigModel
from ds_zo.config.errors import ConfigError, raises_all, rule_error, shown
from ds_zo.config.learning_rates import starting_rate
from ds_zo.config.settings import Settings
from ds_zo.config.stock import DTYPE_NAMES, lookup

Beta = Annotated[float, Field(ge=0, lt=1)]
MAX_SEED = 2**63 - 1

STOCK_PARAMS = frozenset(
    """
    adam_lr adam_w_mode adamw_mode alpha amsgrad betas bias_correction capturable centered comm_backend_name
    cuda_aware dampening decoupled_weight_decay differentiable eps eps_inside_sqrt foreach fp32_optimizer_states
    freeze_step fused initial_accumulator_value lr_decay max_coeff max_grad_norm maximize min_coeff momentum
    momentum_decay muon_lr nesterov ns_method ns_steps rho set_grad_none torch_adam
    """.split()
)
"""Parameters of stock optimizers. They are accepted and ignored, so that a JSON written for AdamW works with only
`optimizer.type` changed."""


class OptimizerParams(ConfigModel):
    """Parameters of every backend."""

    lr: float = Field(1e-3, ge=0, le=100)
    """Learning rate; a `scheduler` scales it."""

    weight_decay: float = Field(0.0, ge=0, le=1000)
    """Decoupled weight decay: each step multiplies the weights by 1 - lr * weight_decay."""

    @classmethod
    def foreign_keys(cls) -> frozenset[str]:
        """Parameters of stock optimizers that the backend does not have."""
        return STOCK_PARAMS - cls.model_fields.keys()

    @property
    def ranks_per_batch(self) -> int:
        """Number of ranks that train on one batch."""
        return 1

    @property
    def clips_by_value(self) -> bool:
        """Whether gradients are clipped by value, so that DeepSpeed's default of `gradient_clipping` does not apply."""
        return False

    def check_config(self, ds_config: dict[str, Any], config: Settings) -> None:
        """Raises a `ConfigError` for values of other sections that do not go with the backend or with its
        parameters."""

    def warnings_of_config(self, config: Settings) -> list[str]:
        """Sentences about legal settings that probably do not do what their author expects."""
        return []

    @model_validator(mode="after")
    def _decay_keeps_the_sign(self) -> Self:
        if self.lr * self.weight_decay >= 1:
            text = (
                f"lr * weight_decay must be < 1, because a step would flip the sign of every weight, got {self.lr:g} * "
                f"{self.weight_decay:g}; lower weight_decay"
            )
            raise rule_error(text, field="weight_decay")
        return self


MOST_PENDING_MEMBERS = 32
"""With more members, ZO's blocks fold in every step: replaying an update of all costs two operations for each weight
and member."""
_OF_MEMBERS = ("num_members", "antithetic", "shaping")
"""Parameters of ZO with `noise` rank1."""


class ZOParams(OptimizerParams):
    """ZO: two forward passes a step, and no backward pass."""

    lr: float = Field(starting_rate("zo").lr, ge=0, le=100)
    """Learning rate; a `scheduler` scales it. Use 1e-7 to 1e-5 for a large model, far less than AdamW's."""

    zo_eps: float = Field(1e-3, gt=0, le=1)
    """Size of the perturbation: losses are computed at theta + zo_eps * z and theta - zo_eps * z."""

    num_directions: int = Field(1, ge=1, le=1024)
    """Number of independent directions z in a step. Each costs two forward passes; a block is uploaded once for all."""

    direction_parallel: int = Field(1, ge=1, le=1024)
    """Number n of ranks that divide the `num_directions` of one batch among them (ranks 0 to n - 1, the next n, ...).
    All n train on the batch of the first of them, so a step uses `train_batch_size / direction_parallel` samples."""

    distribution: Literal["normal", "rademacher"] = "normal"
    """Distribution of z. Rademacher (+1 or -1) is cheaper to draw."""

    noise: Literal["mezo", "rank1"] = "mezo"
    """mezo: z has a number of its own for each weight, and a step evaluates `num_directions`. rank1: z of a matrix is
    an outer product u v^T, and one forward pass evaluates `num_members`; vectors are not trained."""

    num_members: int = Field(32, ge=1, le=1024)
    """With noise rank1: number of members of a step, over all ranks. Each has its own u and v and evaluates its share
    of the batch. More members than sequences share each sequence."""

    antithetic: bool = True
    """With noise rank1: each member is evaluated at theta + zo_eps * z and theta - zo_eps * z; false: at the first
    alone, and compared with the mean of the members."""

    shaping: Literal["none", "zscore", "rank"] = "none"
    """With noise rank1: what takes the place of the losses of a rank's members before they are compared. zscore: their
    distance from the mean in standard deviations; rank: their place in the order, from -0.5 to 0.5. |g| is then about
    1 / zo_eps, whatever the losses: choose `lr` for it."""

    clip_projected_grad: float | None = Field(None, gt=0)
    """Largest |g| that a step uses, where g is the projected gradient; null: no limit. `gradient_clipping` does not
    change ZO."""

    compute_dtype: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Dtype of matrix products; auto: the model's dtype. With bf16 or fp16 a float32 model runs under autocast. A model
    in bf16 or fp16 accepts only its own dtype."""

    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Key of the noise. The same seed gives the same run with any number of ranks, blocks and buffers."""

    @property
    def ranks_per_batch(self) -> int:
        return self.direction_parallel

    @property
    def all_directions(self) -> int:
        """Number of different z in a step, over all ranks."""
        return self.num_members if self.noise == "rank1" else self.num_directions

    @raises_all
    def check_config(self, ds_config: dict[str, Any], config: Settings) -> Iterator[ConfigError]:
        wanted, model, at = self.compute_dtype, DTYPE_NAMES[config.dtype], f"{config.params_at}.compute_dtype"
        if wanted != "auto" and config.dtype is not torch.float32 and wanted != model:
            text = f'compute_dtype must be "auto" or "{model}" with {model}.enabled, got "{wanted}"; leave it out'
            yield ConfigError(text, at=at)
        if wanted != "auto" and config.autocast is not None and wanted != DTYPE_NAMES[config.autocast]:
            text = f'compute_dtype must be "auto" when torch_autocast is enabled, got "{wanted}"; leave it out'
            yield ConfigError(text, at=at)
        if self.noise == "rank1":
            yield from self._check_of_members(config)

    def _check_of_members(self, config: Settings) -> Iterator[ConfigError]:
        """What rank-1 noise does not go with in other sections."""
        casts = self.compute_dtype in ("bf16", "fp16") and config.dtype is torch.float32
        if casts or config.autocast is not None:
            text = (
                'noise "rank1" needs weights in the dtype of the forward, got autocast; set bf16.enabled, or compute '
                "in the model's dtype"
            )
            yield ConfigError(text, at=f"{config.params_at}.noise")
        interval = config.section.stream.writeback_interval
        if self.num_members > MOST_PENDING_MEMBERS and interval is not None and interval > 1:
            text = (
                f"writeback_interval must be 1 with more than {MOST_PENDING_MEMBERS} members, because replaying an "
                f"update costs as much as all of them, got {interval}; leave it out"
            )
            yield ConfigError(text, at="ds_zo.stream.writeback_interval")

    @model_validator(mode="after")
    def _noise_has_its_own_keys(self) -> Self:
        of_mezo, of_rank1 = ("num_directions", "direction_parallel", "distribution"), _OF_MEMBERS
        for name in of_mezo if self.noise == "rank1" else of_rank1:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                needed = "mezo" if self.noise == "rank1" else "rank1"
                text = f'{name} needs noise "{needed}", got {shown(value)} with noise "{self.noise}"; remove one'
                raise rule_error(text, field=name)
        return self

    @model_validator(mode="after")
    def _directions_divide(self) -> Self:
        if self.num_directions % self.direction_parallel:
            text = (
                f"direction_parallel must divide num_directions ({self.num_directions}), so that every rank evaluates "
                f"as many, got {self.direction_parallel}; change one of the two"
            )
            raise rule_error(text, field="direction_parallel")
        return self


class AdapterParams(ConfigModel):
    """LoRA with LOMO: AdamW updates the adapters, and LOMO all other parameters."""

    lr: float = Field(5e-4, ge=0, le=100)
    """AdamW's learning rate for the adapter parameters; a `scheduler` scales it as it scales LOMO's."""

    betas: tuple[Beta, Beta] = Field((0.9, 0.999), strict=False)
    """AdamW's decay rates for the adapter parameters."""

    weight_decay: float = Field(0.0, ge=0, le=1000)
    """AdamW's weight decay for the adapter parameters."""


class LOMOParams(OptimizerParams):
    """LOMO: each gradient is applied to its weights inside the backward pass, and then freed."""

    lr: float = Field(starting_rate("lomo", is_clipped=False).lr, ge=0, le=100)
    """Learning rate; a `scheduler` scales it. It is SGD's, far more than AdamW's."""

    clip_grad_value: float | None = Field(None, gt=0)
    """Clip every element of a gradient to this magnitude, in one backward pass; excludes `gradient_clipping`."""

    norm_scope: Literal["global", "group"] = "global"
    """Norm that `gradient_clipping` limits: global, of the whole gradient (two backward passes), or group, of one
    layer's gradient (one backward pass)."""

    accumulation: Literal["refuse", "sequential"] = "refuse"
    """With `gradient_accumulation_steps` > 1: refuse, or apply one small update for each micro-batch, which differs
    from accumulation."""

    adapter: AdapterParams | None = None
    """Train adapter parameters with AdamW in the same run; null: LOMO trains all parameters."""

    @property
    def clips_by_value(self) -> bool:
        return self.clip_grad_value is not None

    @raises_all
    def check_config(self, ds_config: dict[str, Any], config: Settings) -> Iterator[ConfigError]:
        if self.clip_grad_value is not None and config.clipping_explicit and config.gradient_clipping > 0:
            text = (
                f"clip_grad_value excludes gradient_clipping, got {self.clip_grad_value:g} beside "
                f"{config.gradient_clipping:g}; set gradient_clipping to 0 (HF Trainer: max_grad_norm=0), or leave "
                "clip_grad_value out"
            )
            yield ConfigError(text, at=f"{config.params_at}.clip_grad_value")
        if config.trains and config.gradient_accumulation_steps > 1 and self.accumulation == "refuse":
            text = (
                "gradient_accumulation_steps must be 1, because a gradient is freed once its update is made, got "
                f"{config.gradient_accumulation_steps}: another optimizer.type alone is not enough; use a larger "
                "micro-batch with ds_zo.stream.tiles where blocks stream, or with activation checkpointing; use LSP or "
                "ZO, which accumulate; or set "
                f'{config.params_at}.accumulation to "sequential" for one small update for each micro-batch'
            )
            yield ConfigError(text, at="gradient_accumulation_steps")


class AdaLOMOParams(LOMOParams):
    """AdaLOMO: LOMO with factored second moments and updates normalised by group."""

    lr: float = Field(starting_rate("adalomo").lr, ge=0, le=100)
    """Learning rate; a `scheduler` scales it."""

    decay_rate: float = Field(-0.8, ge=-1, le=0)
    """At step t the moving average of squared gradients keeps the fraction 1 - t ** decay_rate of its last value."""

    adalomo_eps: tuple[Annotated[float, Field(ge=1e-30)], Annotated[float, Field(ge=0)]] = Field(
        (1e-30, 1e-3), strict=False
    )
    """The first number is added to squared gradients. It is at least 1e-30, because a row without a gradient is divided
    by its root. An update is scaled by the root mean square of its weights, or by the second number if that is larger.
    (`eps` is AdamW's and ignored.)"""

    clip_threshold: float = Field(1.0, gt=0)
    """Largest root mean square of a normalised update."""


class AdamWParams(OptimizerParams):
    """Adapter: AdamW trains the parameters that require gradients, over a frozen base that is streamed."""

    lr: float = Field(starting_rate("adapter").lr, ge=0, le=100)
    """Learning rate; a `scheduler` scales it."""

    betas: tuple[Beta, Beta] = Field((0.9, 0.999), strict=False)
    """AdamW's decay rates."""

    eps: float = Field(1e-8, gt=0, le=1)
    """Added to the denominator of AdamW's update."""

    @raises_all
    def check_config(self, ds_config: dict[str, Any], config: Settings) -> Iterator[ConfigError]:
        for key, value in (config.section.params or {}).items():
            text = f"{key} belongs to the optimizer that the script makes, got {shown(value)}; set it there"
            yield ConfigError(text, at=f"ds_zo.params.{key}")
        for key in ("adam_w_mode", "adamw_mode"):
            if lookup(ds_config, f"optimizer.params.{key}") is False:
                text = (
                    f"{key} must be true, because weight decay is decoupled from the gradient, got false; leave it "
                    'out, or make torch.optim.Adam in the script and write "ds_zo": {"backend": "adapter"}'
                )
                yield ConfigError(text, at=f"optimizer.params.{key}")


_RETIRED_LSP_KEYS = {
    "update_rms": ("updates always have AdamW's size", "remove it, and set lr to AdamW's learning rate"),
    "payload_dtype": ("float32 copies were the fastest on every machine that was measured", "remove it"),
    "fit_lr": ("one learning rate serves the fits of all matrices", "remove it"),
    "fit_beta": ("the norms of projectors do not change what LSP trains", "remove it"),
    "fit_timeout_s": ("a fit that ends by the clock gives other weights each time", "remove it, or lower fit_steps"),
}
"""Keys of earlier versions: why LSP does not have them, and the remedy."""


class LSPParams(OptimizerParams):
    """LSP: Adam in the subspace of learned sparse projectors."""

    retired = _RETIRED_LSP_KEYS

    lr: float = Field(starting_rate("lsp").lr, ge=0, le=100)
    """Learning rate; a `scheduler` scales it. Start from AdamW's: the updates of a matrix are as large as AdamW's."""

    betas: tuple[Beta, Beta] = Field((0.9, 0.999), strict=False)
    """Adam's decay rates."""

    eps: float = Field(1e-8, gt=0, le=1)
    """Added to the denominator of Adam's update."""

    subspace_dim: int = Field(512, ge=1, le=65536)
    """d: the gradient of a matrix is projected to d x d before it leaves the GPU. A smaller dimension of the matrix
    takes the place of d. A matrix of at most d * d elements is not projected."""

    nonzeros_per_row: int = Field(4, ge=1, le=1024)
    """r: number of non-zero entries in each row of a projector."""

    check_interval: int = Field(1000, ge=1)
    """Steps between two tests of how well the projectors fit the gradient."""

    calibration_batches: int = Field(4, ge=1, le=1024)
    """Number of micro-batches to whose mean gradient projectors are fitted. The next micro-batch tests the fitted ones:
    they are used if they capture more of its gradient than the present ones."""

    bias_threshold: float = Field(0.5, gt=0, le=1)
    """Fit the projectors of a matrix again when they lose more than this fraction of its gradient."""

    fit_steps: int = Field(60, ge=0, le=1_000_000)
    """Largest number of steps of one fit, over all of `calibration_batches`."""

    projector: Literal["learned", "random", "none"] = "learned"
    """learned: fitted projectors; random: projectors as they are drawn; none: no projection."""

    schedule: Literal["layerwise", "sync"] = "layerwise"
    """layerwise: copy and update each layer on the CPU during the rest of the backward pass; sync: wait for it. Both
    give the same weights."""

    edge: Literal["lsp", "freeze", "dense"] = "dense"
    """Embeddings and head: dense trains them with Adam, lsp projects them as it does other matrices, freeze does not
    train them."""

    clip_scope: Literal["matrix", "global"] = "matrix"
    """What `gradient_clipping` limits to c. global: the norm of all gradients, for which the layer-wise schedule has to
    wait. matrix: the norm of each of k parameters, to c / sqrt(k), so that the norm of all is at most c."""

    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Seed of the positions and first values of projectors."""

    @raises_all
    def check_config(self, ds_config: dict[str, Any], config: Settings) -> Iterator[ConfigError]:
        if config.stream and not config.offload_optimizer:
            text = (
                'LSP with weights on the host must run Adam on the host too, got offload_param.device "cpu" without '
                'offload_optimizer; add "offload_optimizer": {"device": "cpu"}, or remove offload_param'
            )
            yield ConfigError(text, at="zero_optimization.offload_optimizer.device")

    def warnings_of_config(self, config: Settings) -> list[str]:
        needs = []
        if self.clip_scope == "global":
            needs.append((f"{config.params_at}.clip_scope global", "clip_scope matrix does not"))
        if torch.float16 in (config.dtype, config.autocast):
            needs.append(("the loss scaling of fp16", "bf16 does not"))
        return [
            f"{what} needs the whole backward pass before the first update, so the layerwise schedule overlaps "
            f"nothing; {remedy}"
            for what, remedy in needs
            if self.schedule == "layerwise"
        ]

    @model_validator(mode="after")
    def _row_fits_the_subspace(self) -> Self:
        if self.nonzeros_per_row > self.subspace_dim:
            text = (
                f"nonzeros_per_row must be <= subspace_dim ({self.subspace_dim}), got {self.nonzeros_per_row}; lower it"
            )
            raise rule_error(text, field="nonzeros_per_row")
        return self
