"""ZO: two or more forwards a step on perturbed weights, blocks streamed from host memory."""
