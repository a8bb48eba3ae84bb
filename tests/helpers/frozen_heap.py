"""Imported last by a process that others are forked from: no collection of garbage in them looks through, and so copies,
what was imported before."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
