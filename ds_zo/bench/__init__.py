"""Measurements: cases, contenders and rows. Peers run in the same run on the same machine."""
