#!/usr/bin/env bash
# Repeats the tests that depend on the CPU as other CPUs would run them (docs/exactness.md): without FP16 instructions,
# and at each narrower vector width on x86-64. About two minutes. Needs the .venv of launch/test.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"

enter_tests

tests() { python -m pytest -m "not gpu" -q -n "${TEST_PROCESSES:-2}" "$@"; }

widths=()
if [ "$(uname -m)" = x86_64 ]; then
    case "$(python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())')" in
        AVX512) widths=(default avx2) ;;
        AVX2) widths=(default) ;;
    esac
fi
for width in "${widths[@]}"; do
    say "torch's CPU kernels for $width"
    ATEN_CPU_CAPABILITY=$width tests tests/backends/test_bit_equality.py tests/backends/lsp/test_lsp_streamed.py \
        tests/optim/test_host_adam.py tests/ops/test_encode_on_device.py tests/ops/test_nf4.py
done
say "a CPU without FP16 instructions"
PYTHONPATH="$repo/tests/cpu_without_fp16${PYTHONPATH:+:$PYTHONPATH}" tests -k "fp16 or overflow or scale" \
    tests/backends/lomo/test_lomo_precision.py tests/backends/zo/test_zo_precision.py tests/backends/lomo/test_lomo_streamed.py \
    tests/checkpoint/test_resume_first_order.py tests/plugin/test_plugin.py
