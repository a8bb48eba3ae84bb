"""Streaming: blocks stored on the host pass through a few device slots. One implementation for all backends."""
