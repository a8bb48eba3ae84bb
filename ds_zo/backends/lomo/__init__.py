"""LOMO and AdaLOMO: the update of a parameter is made as soon as its gradient is there."""
