"""HumanEval as a task of `ds-zo train`, its training data, and the sandbox in which a model's programs run.

    python launch/train.py --task-file benchmarks/humaneval/task.py --task humaneval --model DIR

lm-evaluation-harness scores HumanEval too. Ours stays because the same run trains on functions that leave its problems
out, and because nothing can be installed on the machine with the GPU.
"""
