"""Blocks that live on the host and pass through a few device slots: one core for every backend."""
