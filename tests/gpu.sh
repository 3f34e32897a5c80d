#!/usr/bin/env bash
# Runs every test that needs a GPU, those marked `gpu`.
#
#   tests/gpu.sh                                  all of them
#   tests/gpu.sh tests/test_gpu.py -k bfloat16    arguments go to pytest; paths are those of the repository
#   PYTHON=/path/to/python tests/gpu.sh           another interpreter than .venv's, or `python`
#
# Needs: a CUDA device that torch can use (two, or the tests over two devices are skipped), Triton (or those of its
# kernels are), and hf-dsde's dependencies with pytest and hypothesis (`make venv`). No network, no model is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi

# Without this, a machine whose driver does not work would skip everything and look fine.
"$PYTHON" - <<'CHECK'
import sys

import torch

if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device: the tests marked gpu would all be skipped.")
for index in range(torch.cuda.device_count()):
    print(f"cuda:{index} is a {torch.cuda.get_device_name(index)}")
CHECK

exec "$PYTHON" -m pytest -m gpu "$@"
