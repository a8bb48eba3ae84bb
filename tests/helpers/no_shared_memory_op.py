"""A pytest plugin: DeepSpeed does not compile its shared-memory collectives, which takes minutes in a new environment.

One rank needs no collectives. `tools/versions.sh` loads the plugin.
"""

from __future__ import annotations

import deepspeed.ops

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
