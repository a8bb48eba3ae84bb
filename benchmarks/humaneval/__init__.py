"""HumanEval as a task of `ds-zo train`, its training data, and the sandbox of a model's programs: see ../README.md."""
