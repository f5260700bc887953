#!/usr/bin/env bash
# Prepares a GPU machine that has PyTorch but not this project: builds the extension in place and unpacks carried wheels.
# usage: source benchmarks/gpu/device.sh   (from the repository's root; wheels, if any, in .bundle/whl)
python3 setup.py -q build_ext --inplace >/dev/null 2>&1 || { echo "the extension does not build" >&2; return 1; }
if ls .bundle/whl/*.whl >/dev/null 2>&1; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .bundle/whl/*.whl
fi
export PYTHONPATH="/tmp/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
