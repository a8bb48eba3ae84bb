"""`optimizer.params` of each backend."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from ds_zo.config.base import ConfigModel
from ds_zo.config.errors import rule_error, shown

Beta = Annotated[float, Field(ge=0, lt=1)]
MAX_SEED = 2**63 - 1

STOCK_PARAMS = frozenset(
    {
        "adam_lr",
        "adam_w_mode",
        "adamw_mode",
        "alpha",
        "amsgrad",
        "betas",
        "bias_correction",
        "capturable",
        "centered",
        "comm_backend_name",
        "cuda_aware",
        "dampening",
        "decoupled_weight_decay",
        "differentiable",
        "eps",
        "eps_inside_sqrt",
        "foreach",
        "fp32_optimizer_states",
        "freeze_step",
        "fused",
        "initial_accumulator_value",
        "lr_decay",
        "max_coeff",
        "max_grad_norm",
        "maximize",
        "min_coeff",
        "momentum",
        "momentum_decay",
        "muon_lr",
        "nesterov",
        "ns_method",
        "ns_steps",
        "rho",
        "set_grad_none",
        "torch_adam",
    }
)
"""Parameters of stock optimizers: a JSON written for AdamW works with only `optimizer.type` changed."""


class OptimizerParams(ConfigModel):
    """What every backend takes."""

    lr: float = Field(1e-3, ge=0, le=100)
    """Learning rate; a `scheduler` scales it."""

    weight_decay: float = Field(0.0, ge=0, le=1000)
    """Decoupled weight decay: each step multiplies the weights by 1 - lr * weight_decay."""

    @model_validator(mode="after")
    def _decay_keeps_the_sign(self) -> Self:
        if self.lr * self.weight_decay >= 1:
            text = (
                f"lr * weight_decay must be < 1, or a step flips the sign of every weight, got {self.lr:g} * "
                f"{self.weight_decay:g}; lower weight_decay"
            )
            raise rule_error(text, field="weight_decay")
        return self


class ZOParams(OptimizerParams):
    """ZO: two forward passes, no backward."""

    lr: float = Field(1e-6, ge=0, le=100)
    """Learning rate; a `scheduler` scales it. Expect 1e-7 to 1e-5 for a large model, far below AdamW's."""

    zo_eps: float = Field(1e-3, gt=0, le=1)
    """Perturbation size: losses are taken at theta + zo_eps * z and theta - zo_eps * z."""

    num_directions: int = Field(1, ge=1, le=1024)
    """Independent z drawn a step; each costs two forward passes, all share one upload of a block."""

    direction_parallel: int = Field(1, ge=1, le=1024)
    """Ranks that share a batch and divide its `num_directions` among them (ranks 0 to n - 1, the next n, ...): they
    train on what the first of them is given, so a step learns from `train_batch_size / direction_parallel` samples."""

    distribution: Literal["normal", "rademacher"] = "normal"
    """What z is drawn from. Rademacher (+1 or -1) is cheaper to draw."""

    clip_projected_grad: float | None = Field(None, gt=0)
    """Largest |g|, the projected gradient, a step may use; null: no limit. `gradient_clipping` never alters ZO."""

    compute_dtype: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """What matrix products are computed in; auto: the model's dtype. A float32 model runs under autocast to bf16 or
    fp16, a model in bf16 or fp16 admits only its own."""

    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Key of the noise: the same seed gives the same run, whatever the ranks, blocks and slots."""

    @model_validator(mode="after")
    def _directions_divide(self) -> Self:
        if self.num_directions % self.direction_parallel:
            text = (
                f"direction_parallel must divide num_directions ({self.num_directions}), so that every rank tries as "
                f"many, got {self.direction_parallel}; change one of the two"
            )
            raise rule_error(text, field="direction_parallel")
        return self


class AdapterParams(ConfigModel):
    """LoRA beside LOMO: adapters by AdamW, the rest by LOMO."""

    lr: float = Field(5e-4, ge=0, le=100)
    """AdamW's learning rate for the adapter parameters; a `scheduler` scales it as it scales LOMO's."""

    betas: tuple[Beta, Beta] = Field((0.9, 0.999), strict=False)
    """AdamW's decay rates for the adapter parameters."""

    weight_decay: float = Field(0.0, ge=0, le=1000)
    """AdamW's weight decay for the adapter parameters."""


class LOMOParams(OptimizerParams):
    """LOMO: each gradient is consumed by its update inside the backward pass."""

    clip_grad_value: float | None = Field(None, gt=0)
    """Clip every gradient element to this magnitude, in one backward pass; excludes `gradient_clipping`."""

    norm_scope: Literal["global", "group"] = "global"
    """What `gradient_clipping` measures: the whole gradient (two backward passes) or one layer's (one pass)."""

    accumulation: Literal["refuse", "sequential"] = "refuse"
    """With `gradient_accumulation_steps` > 1: refuse, or apply one small update a micro-batch (not the same as
    accumulating)."""

    adapter: AdapterParams | None = None
    """Train adapter parameters with AdamW in the same run; null: everything by LOMO."""


class AdaLOMOParams(LOMOParams):
    """AdaLOMO: LOMO with factored second moments and an update normalised by group."""

    decay_rate: float = Field(-0.8, ge=-1, le=0)
    """The second moment of step t keeps 1 - t ** decay_rate of its past."""

    adalomo_eps: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = Field(
        (1e-30, 1e-3), strict=False
    )
    """Two floors: one added to squared gradients, one under the weights' own scale. (`eps` is AdamW's, ignored.)"""

    clip_threshold: float = Field(1.0, gt=0)
    """Largest root mean square of a normalised update."""


class LSPParams(OptimizerParams):
    """LSP: Adam in a subspace of learned sparse projectors."""

    lr: float = Field(1e-4, ge=0, le=100)
    """Learning rate; a `scheduler` scales it. Start from AdamW's: updates of every matrix are as large as AdamW's."""

    betas: tuple[Beta, Beta] = Field((0.9, 0.999), strict=False)
    """Adam's decay rates."""

    eps: float = Field(1e-8, gt=0, le=1)
    """Adam's denominator floor."""

    subspace_dim: int = Field(512, ge=1, le=65536)
    """d: a matrix's gradient becomes d x d before it leaves the GPU. Matrices smaller than that keep their own size."""

    nonzeros_per_row: int = Field(4, ge=1, le=1024)
    """r: non-zero entries in each projector row."""

    check_interval: int = Field(1000, ge=1)
    """Steps between tests of how well the projectors still fit."""

    calibration_batches: int = Field(4, ge=1, le=1024)
    """Micro-batches whose mean gradient projectors are fitted to. The next one tests them: they serve if they capture
    more of its gradient than the present projectors."""

    bias_threshold: float = Field(0.5, gt=0, le=1)
    """Refit a matrix's projectors when the part of its gradient they lose exceeds this."""

    fit_steps: int = Field(60, ge=0, le=1_000_000)
    """Most steps one fit may take, over all of `calibration_batches`."""

    fit_timeout_s: float = Field(60.0, gt=0)
    """Most seconds one fit may take."""

    fit_lr: float = Field(0.3, gt=0, le=100)
    """Learning rate of a fit, as a part of the size of the projectors' values."""

    fit_beta: float = Field(0.0, ge=0)
    """Weight of the projectors' own norms in a fit's objective."""

    payload_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """What crosses the bus; int8 carries its error forward."""

    projector: Literal["learned", "random", "none"] = "learned"
    """Fit projectors, leave them random, or project nothing."""

    schedule: Literal["layerwise", "sync"] = "layerwise"
    """Overlap each layer's trip to the CPU with the rest of the backward pass, or wait for it; same weights."""

    edge: Literal["lsp", "freeze", "dense"] = "lsp"
    """Embeddings and head: projected too, not trained, or dense Adam."""

    clip_scope: Literal["matrix", "global"] = "matrix"
    """What `gradient_clipping` measures; global serialises the layer-wise schedule."""

    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Where projector positions and first values are drawn from."""

    @model_validator(mode="before")
    @classmethod
    def _updates_have_one_size(cls, params: Any) -> Any:
        if isinstance(params, dict) and "update_rms" in params:
            text = (
                f"updates always have AdamW's size, so update_rms is not a key, got {shown(params['update_rms'])}; "
                "remove it, and write AdamW's learning rate to lr"
            )
            raise rule_error(text, field="update_rms")
        return params

    @model_validator(mode="after")
    def _row_fits_the_subspace(self) -> Self:
        if self.nonzeros_per_row > self.subspace_dim:
            text = (
                f"nonzeros_per_row must be <= subspace_dim ({self.subspace_dim}), got {self.nonzeros_per_row}; lower it"
            )
            raise rule_error(text, field="nonzeros_per_row")
        return self
