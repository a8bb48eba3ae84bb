"""The checked settings of a JSON, besides the parameters of its optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from ds_zo.config.section import DsZoConfig
from ds_zo.config.stock import StockKeys


@dataclass(frozen=True, kw_only=True)
class Settings(StockKeys):
    """Settings that rules of an optimizer's parameters read."""

    backend: str
    """The name of a registered backend, in lower case."""

    section: DsZoConfig

    ignored: tuple[str, ...] = ()
    """Dotted names of keys that are accepted and have no effect."""

    warnings: tuple[str, ...] = ()
    """Sentences that the engine logs as warnings when it is made."""

    params_at: str = "optimizer.params"
    """Place of the optimizer's keys in the JSON: `ds_zo.params` where there is no optimizer block."""

    trains: bool = True
    """False for an engine that has no optimizer: it evaluates, and refuses to train."""
