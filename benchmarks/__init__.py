"""Benchmarks of this repository, outside of the wheel: speed suites, accuracy grids, studies, and their rows."""
