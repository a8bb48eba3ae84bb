"""Figures that the three papers print, by table: what `paper_pages` sets beside our rows."""

from __future__ import annotations

Cell = float | None
"""None: the paper has a dash, which means that the method ran out of memory."""

ZO_TABLE_1: dict[tuple[str, str], tuple[Cell, Cell, Cell, Cell]] = {
    # (size, dtype): MeZO MB, ZO MB, MeZO tokens/s, ZO tokens/s
    ("125m", "fp32"): (3091, 2941, 14889, 13074),
    ("350m", "fp32"): (4219, 3393, 5274, 5099),
    ("1.3b", "fp32"): (9117, 4413, 1954, 1954),
    ("2.7b", "fp32"): (15277, 5261, 1087, 1087),
    ("6.7b", "fp32"): (32083, 8329, 499, 499),
    ("13b", "fp32"): (58251, 12113, 270, 270),
    ("30b", "fp32"): (None, 18879, None, 122),
    ("66b", "fp32"): (None, 29937, None, 40),
    ("175b", "fp32"): (None, 49203, None, 14),
    ("125m", "fp16"): (1801, 1661, 31058, 31058),
    ("350m", "fp16"): (2389, 1643, 13508, 12284),
    ("1.3b", "fp16"): (4887, 2651, 6788, 6788),
    ("2.7b", "fp16"): (7933, 3111, 4227, 4227),
    ("6.7b", "fp16"): (16311, 4539, 2455, 2455),
    ("13b", "fp16"): (29411, 6445, 1406, 1340),
    ("30b", "fp16"): (63953, 10369, 651, 597),
    ("66b", "fp16"): (None, 14143, None, 273),
    ("175b", "fp16"): (None, 24667, None, 37),
}

ZO_TABLE_5: dict[str, tuple[Cell, float, float, float, float]] = {
    # size: tokens/s of MeZO, of ZO without overlap, without reusable memory, without efficient update, of ZO
    "125m": (14889, 9486, 5807, 13031, 13074),
    "350m": (5274, 3432, 1951, 5099, 5099),
    "1.3b": (1954, 1109, 735, 1567, 1954),
    "2.7b": (1087, 573, 422, 849, 1087),
    "6.7b": (499, 225, 184, 373, 499),
    "13b": (270, 105, 103, 198, 270),
    "30b": (None, 35, 46, 81, 122),
    "66b": (None, 22, 15, 36, 40),
    "175b": (None, 8, 5, 13, 14),
}

ZO_TABLE_9: dict[tuple[str, str], tuple[float, float, float, float]] = {
    # (autocast, size): tokens/s with blocks in float32, fp16, bf16, fp8
    ("fp16", "1.3b"): (4827, 4770, 4760, 4802),
    ("fp16", "2.7b"): (2811, 2974, 2974, 2997),
    ("fp16", "6.7b"): (1271, 1641, 1641, 1662),
    ("fp16", "13b"): (561, 930, 930, 951),
    ("fp16", "30b"): (286, 416, 416, 425),
    ("fp16", "66b"): (127, 192, 192, 198),
    ("fp16", "175b"): (43, 65, 65, 68),
    ("bf16", "1.3b"): (4565, 4430, 4430, 4463),
    ("bf16", "2.7b"): (2778, 2816, 2816, 2818),
    ("bf16", "6.7b"): (1273, 1594, 1594, 1612),
    ("bf16", "13b"): (678, 910, 910, 924),
    ("bf16", "30b"): (285, 407, 407, 415),
    ("bf16", "66b"): (127, 188, 188, 194),
    ("bf16", "175b"): (43, 64, 64, 67),
}

ZO_TABLE_6: dict[str, tuple[float, float, float, float, float]] = {
    # size: tokens/s of MeZO, with torch.save; of ZO, with torch.save, with asynchronous checkpoints
    "1.3b": (1954, 319, 1954, 462, 1954),
    "2.7b": (1087, 160, 1087, 221, 1087),
    "6.7b": (499, 52, 499, 88, 499),
}

ZO_TABLES_7_8: dict[tuple[int, int], dict[str, tuple[float, float, float, float]]] = {
    # (batch, length): by size MeZO MB, ZO MB, MeZO tokens/s, ZO tokens/s
    (1, 2048): {"1.3b": (9117, 4413, 1954, 1954), "2.7b": (15277, 5261, 1087, 1087), "6.7b": (32083, 8329, 499, 499)},
    (2, 2048): {"1.3b": (10809, 6617, 1055, 1055), "2.7b": (16575, 7563, 594, 594), "6.7b": (33857, 9865, 278, 278)},
    (4, 2048): {"1.3b": (13249, 9451, 566, 566), "2.7b": (19409, 10397, 312, 312), "6.7b": (37239, 13485, 145, 145)},
    (8, 2048): {"1.3b": (18917, 15119, 289, 289), "2.7b": (24745, 16065, 160, 160), "6.7b": (42278, 19153, 75, 75)},
    (1, 1024): {"1.3b": (8333, 3747, 3689, 3689), "2.7b": (14175, 4669, 2092, 2092), "6.7b": (31475, 7721, 901, 901)},
    (1, 4096): {"1.3b": (11379, 7581, 830, 830), "2.7b": (16973, 8453, 490, 490), "6.7b": (35549, 11319, 250, 250)},
    (1, 8192): {"1.3b": (32051, 28253, 302, 302), "2.7b": (37693, 29173, 187, 187), "6.7b": (54365, 32183, 108, 108)},
}

LOMO_TABLE_1: dict[tuple[str, bool], tuple[float, float, float, float, float]] = {
    # (method, checkpointed): parameters, gradients, states, activations, total; the unit is GiB
    ("adamw_master", False): (12.55, 12.55, 75.31, 45.61, 147.02),
    ("adamw_master", True): (12.55, 12.55, 75.31, 1.79, 102.20),
    ("sgd_master", False): (12.55, 12.55, 25.10, 45.61, 96.81),
    ("sgd_master", True): (12.55, 12.55, 25.10, 1.79, 51.99),
    ("lomo", False): (12.55, 0.24, 0.00, 45.61, 59.40),
    ("lomo", True): (12.55, 0.24, 0.00, 1.79, 14.58),
}

LOMO_TABLE_2: dict[tuple[str, str], tuple[int, float, float]] = {
    # (size, method): number of RTX 3090, GB of each, tokens/s of each
    ("7b", "adamw_master"): (8, 15.76, 67.37),
    ("7b", "sgd_master"): (8, 9.49, 69.66),
    ("7b", "lomo"): (1, 13.61, 769.92),
    ("13b", "sgd_master"): (8, 15.74, 32.51),
    ("13b", "lomo"): (2, 15.92, 66.19),
    ("30b", "lomo"): (4, 19.78, 11.61),
    ("65b", "lomo"): (8, 19.18, 4.93),
}

LSP_FIGURE_5: dict[str, tuple[str, float]] = {
    # our shape: the paper's case, and LSP's throughput over ZeRO-Offload's (d = 512), in the paper's order
    "gpt2-774m": ("GPT2-774M, laptop", 2.03),
    "llama-3b": ("Llama-3B, workstation", 3.09),
    "llama-1.3b": ("DeepSeek-Coder-1.3B, laptop", 2.04),
    "llama-7b": ("DeepSeek-Coder-6.7B, workstation", 3.33),
}
