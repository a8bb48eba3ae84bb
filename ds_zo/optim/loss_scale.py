"""Loss scaling, which keeps fp16 gradients within range.

DeepSpeed's `DynamicLossScaler` is not used: it waits one step longer than `loss_scale_window`, and cannot be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_zo.config.stock import LossScale


class LossScaler:
    """Halves the scale at an overflow and doubles it after `loss_scale_window` steps without one. A static scale stays.

    The first overflow halves it at once, as in LOMO's paper, unless the JSON sets `hysteresis`.
    """

    def __init__(self, settings: LossScale) -> None:
        self._settings = settings
        self._hysteresis = settings.hysteresis if "hysteresis" in settings.written else 1
        self.restart()

    def restart(self) -> None:
        settings = self._settings
        self.scale = float(settings.loss_scale or 2.0**settings.initial_scale_power)
        self._num_clean = 0
        self._overflows_left = self._hysteresis

    @property
    def dynamic(self) -> bool:
        return self._settings.loss_scale == 0

    def update(self, *, overflow: bool) -> None:
        if not self.dynamic:
            return
        if overflow:
            self._num_clean = 0
            if self._overflows_left > 1:
                self._overflows_left -= 1
            else:
                self.scale = max(self.scale / 2, float(self._settings.min_loss_scale))
            return
        self._num_clean += 1
        if self._num_clean % self._settings.loss_scale_window == 0:
            self.scale *= 2
            self._overflows_left = self._hysteresis

    def publish(self, optimizer: Any, *, overflow: bool) -> None:
        """Sets the attributes of the optimizer from which DeepSpeed's monitors and Accelerate read the loss scale."""
        optimizer.cur_scale, optimizer.overflow = self.scale, overflow

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "num_clean": self._num_clean, "overflows_left": self._overflows_left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a dynamic scale. A static scale comes from the JSON, also in a resumed run."""
        if self.dynamic:
            self.scale = float(state["scale"])
            self._num_clean = int(state["num_clean"])
            self._overflows_left = int(state["overflows_left"])
