"""Bytes and seconds of a training run, before anything is allocated: `plan(model, device_memory_gb=24, ...)`."""

from ds_zo.planner.estimate import Estimate, Limits
from ds_zo.planner.models import Model, load_model
from ds_zo.planner.plan import IN_4_BITS_FORMS, Plan, contenders, plan
from ds_zo.planner.rates import CARDS, Rates, card_rates, load_rates, with_link
from ds_zo.planner.scaling import Scaled, render_scaling, scale
from ds_zo.planner.table import render
from ds_zo.planner.tokens import SLACK, smallest_unbound

__all__ = [
    "CARDS",
    "IN_4_BITS_FORMS",
    "SLACK",
    "Estimate",
    "Limits",
    "Model",
    "Plan",
    "Rates",
    "Scaled",
    "card_rates",
    "contenders",
    "load_model",
    "load_rates",
    "plan",
    "render",
    "render_scaling",
    "scale",
    "smallest_unbound",
    "with_link",
]
