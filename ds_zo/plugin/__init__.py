"""The only code that knows the internals of DeepSpeed, Accelerate and HF Trainer."""

from __future__ import annotations

from ds_zo.plugin.patches import install, uninstall

__all__ = ["install", "uninstall"]
