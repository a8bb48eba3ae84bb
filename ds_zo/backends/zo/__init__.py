"""The ZO backend: two or more forward passes per step on perturbed weights, with blocks streamed from host memory."""
