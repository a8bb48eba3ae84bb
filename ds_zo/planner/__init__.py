"""Bytes and seconds of a training run, before anything is allocated."""
