"""Versions of other packages: the tested ones, the check at import, and every branch that depends on a version.

Each branch names the oldest version without the difference. The branch goes when that version becomes the oldest
supported one.
"""

from __future__ import annotations

import copy
import os
import platform
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Range:
    """The releases of a package that this package is tested with. Releases outside the range are warned of."""

    first: str
    newest: str
    """The newest minor release. Its patch releases belong to the range."""
    fails_below: str | None = None
    """Older releases than this one are known to fail, and are refused."""
    end: str | None = None
    """Where a test shows that later releases may break this package: pip refuses this one and later ones."""

    def __str__(self) -> str:
        return f"{self.first} to {self.newest}"

    @property
    def required(self) -> str:
        """What pyproject.toml asks of pip."""
        return f">={self.first}" + (f",<{self.end}" if self.end else "")

    def contains(self, version: str) -> bool:
        """Whether a version is inside, by PEP 440: pre-releases of `first` are not."""
        from packaging.version import Version  # here: tools/versions.py reads this file without packages

        found = Version(version)
        return found >= Version(self.first) and found.release[:2] <= Version(self.newest).release


SUPPORTED = {
    "python": Range("3.10", "3.13", fails_below="3.10"),
    "torch": Range("2.10", "2.13"),
    "deepspeed": Range("0.18.6", "0.19", fails_below="0.18.3", end="0.20"),
    "transformers": Range("4.57.1", "5.22", fails_below="4.56"),
    "accelerate": Range("1.10", "1.15"),
    "peft": Range("0.18", "0.21"),
}
"""The one table of supported versions. `pyproject.toml` and docs/support.md say the same, and a test compares them."""


@cache
def installed(package: str) -> str | None:
    """The installed version of a package; None without one. The package is not imported."""
    if package == "python":
        return platform.python_version().removesuffix("+")  # which marks a build from a checkout
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def remedy(package: str) -> str:
    """What a user does to get a tested version."""
    supported = SUPPORTED[package]
    return f"use Python {supported}" if package == "python" else f"pip install '{package}=={supported.newest}.*'"


def warning() -> str | None:
    """One line about the installed packages outside their ranges; None without one. Raises if a version is known to
    fail."""
    from packaging.version import Version

    found = {package: version for package in SUPPORTED if (version := installed(package))}
    outside = [package for package, version in found.items() if not SUPPORTED[package].contains(version)]
    for package in outside:
        oldest = SUPPORTED[package].fails_below
        if oldest is not None and Version(found[package]) < Version(oldest):
            text = f"ds_zo needs {package} {SUPPORTED[package].required}, got {package} {found[package]}"
            raise ImportError(f"{text}, with which it fails: {remedy(package)}")
    if not outside:
        return None
    untested = ", ".join(f"{package} {found[package]} (tested: {SUPPORTED[package]})" for package in outside)
    remedies = ", ".join(map(remedy, outside))
    return f"ds_zo is not tested with {untested}: if something fails, {remedies} (all tested versions: constraints.txt)"


def check_installed() -> None:
    """Checks the installed packages. The first process of a machine logs the warning; all processes raise."""
    text = warning()
    if text is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        from deepspeed.utils import logger

        logger.warning(text)


def _before(package: str, version: str) -> bool:
    """Whether the installed release of `package` is older than `version`. A pre-release has its release's code."""
    from packaging.version import Version

    return Version(installed(package) or version).release < Version(version).release


def add_engine_attributes(engine: Any) -> None:
    """Sets attributes that the constructor of `DeepSpeedEngine` sets in newer versions. Call it before that
    constructor."""
    if _before("deepspeed", "0.19.6"):
        engine._running_engine_backward_count = 0
        engine._running_engine_backward_lock = threading.Lock()
    if _before("deepspeed", "0.19.4"):
        engine._unmanaged_backward_count = 0


def manages_accumulation(engine: Any) -> bool:
    """Whether the engine itself counts the micro-batches of an accumulation window, which is DeepSpeed's default."""
    if _before("deepspeed", "0.19.4"):
        return True
    return bool(engine.managed_gradient_accumulation())


REMOVED_FEATURES = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
    "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.mics_shard_size",
    "zero_optimization.zeropp_loco_param",
)
"""Keys of features that DeepSpeed 0.19.8 has removed. Our engines have none of these features."""


def refuses_removed_features() -> bool:
    """Whether DeepSpeed refuses the keys of removed features, even if they are switched off. Older versions read
    them."""
    return not _before("deepspeed", "0.19.8")


def tied_names(model: Any) -> set[str]:
    """Names of the parameters that a transformers model does not save, because it ties them to other parameters when it
    loads them."""
    if _before("transformers", "5.0"):
        from transformers.modeling_utils import _get_tied_weight_keys

        patterns = _get_tied_weight_keys(model)
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
    return set(getattr(model, "all_tied_weights_keys", None) or ())


def converts_weights(model: Any) -> bool:
    """Whether the files of a transformers model have another layout of weights than its parameters."""
    if _before("transformers", "5.0"):
        return bool(model._checkpoint_conversion_mapping)
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return bool(conversions)


def renamed_tensors(
    model: Any, tensors: Iterable[str], *, weights: Mapping[str, Any]
) -> Iterator[tuple[str, str, str | None, Any]]:
    """For each tensor of a checkpoint of which transformers makes weights of the model: its name, the name of the first
    such weight, and the rule of conversion with the pattern of the rule that the tensor matches. Both are None for a
    tensor that is a weight itself. `weights`: the model's state_dict."""
    if _before("transformers", "5.0"):  # it has a module for each expert, as checkpoints do
        yield from ((name, name, None, None) for name in tensors if name in weights)
        return
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    for name in sorted(tensors, key=loading.dot_natural_key):
        prefix = model.base_model_prefix
        weight, pattern = loading.rename_source_key(name, renamings, converters, prefix, weights)
        if weight not in weights and name in weights:  # the model has the name that a rule replaces
            weight, pattern = name, None
        if weight in weights:
            yield name, weight, pattern, by_pattern.get(pattern)


def apply_rule(
    rule: Any, weight: str, read: Iterable[tuple[str | None, str, Any]], *, config: Any, weights: Mapping[str, Any]
) -> dict[str, Any]:
    """The weights that a rule of `renamed_tensors` makes. `weight`: the first of them. `read`: the tensors with their
    patterns and names."""
    rule = copy.deepcopy(rule)  # it collects tensors
    for pattern, name, tensor in read:
        rule.add_tensor(weight, name, pattern, tensor)
    model = SimpleNamespace(config=config, get_parameter=weights.__getitem__)  # rules read nothing else of a model
    made = rule.convert(weight, model=model, config=config)
    found: dict[str, Any] = made[0] if isinstance(made, tuple) else made  # 5.0 returns errors beside the weights
    return {name: t[0] if isinstance(t, list) else t for name, t in found.items()}


def dtype_without_request(config: Any) -> Any:
    """The dtype in which `from_pretrained` loads a model if the caller names none."""
    if _before("transformers", "5.0"):
        import torch

        return torch.get_default_dtype()
    return config.dtype


OUTPUT_CAPTURING = "transformers.utils.output_capturing"
"""The module with the hooks by which transformers collects outputs of inner modules."""


def output_collector() -> Any:
    """The context variable of transformers that holds, while a model's forward runs, the lists in which it collects
    outputs of inner modules. None before 5.2, where each forward has lists of its own that nothing else reaches, and
    where no such model has been imported."""
    capturing = sys.modules.get(OUTPUT_CAPTURING)
    return None if capturing is None else capturing._active_collector


def no_init_weights() -> AbstractContextManager[None]:
    """Context in which transformers makes models without initialising their weights."""
    if _before("transformers", "5.0"):
        from transformers.modeling_utils import no_init_weights as context
    else:
        from transformers.initialization import no_init_weights as context
    found: AbstractContextManager[None] = context()
    return found


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Context in which `torch.autocast` does nothing on the meta device, and is not enabled there. Otherwise both raise
    there, and rotary embeddings of transformers before 5.4 call them."""
    import torch

    original, is_enabled = torch.autocast, torch.is_autocast_enabled

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return nullcontext() if device_type == "meta" else original(device_type, *args, **kwargs)

    def is_autocast_enabled(*device_type: str) -> bool:
        return device_type != ("meta",) and is_enabled(*device_type)

    if _before("transformers", "5.4"):
        torch.autocast = autocast  # type: ignore[assignment,misc]
        torch.is_autocast_enabled = is_autocast_enabled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autocast = original  # type: ignore[misc]
        torch.is_autocast_enabled = is_enabled


def saving_arguments() -> dict[str, Any]:
    """Arguments with which `save_pretrained` of transformers writes parameters under their own names."""
    return {} if _before("transformers", "5.0") else {"save_original_format": False}
