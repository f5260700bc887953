#!/usr/bin/env bash
# Brings the real peers the tests use into .cache/tools, without root and without starting a service.
# Debian and Ubuntu: apt-get download + dpkg -x. Where that is not possible, the tests that need a tool skip and say so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=.cache/tools
mkdir -p "$tools/deb"
have() { [[ -x "$tools/root/usr/bin/$1" ]]; }
fetch() { # fetch PROGRAM PACKAGE
  have "$1" && return 0
  command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo "tools: no apt-get here, tests with $1 will skip" >&2; return 0; }
  (cd "$tools/deb" && apt-get download "$2" >/dev/null 2>&1) ||
    { [[ $(id -u) == 0 ]] && apt-get update >/dev/null 2>&1 && (cd "$tools/deb" && apt-get download "$2" >/dev/null 2>&1); } ||
    { echo "tools: cannot download $2 (run 'apt-get update' as root once); tests with $1 will skip" >&2; return 0; }
  dpkg -x "$tools/deb/$2"_*.deb "$tools/root"
}
fetch prometheus prometheus
fetch prometheus-alertmanager prometheus-alertmanager
# uvloop for one test; in .venv, uvicorn would take it for every server
[[ -e $tools/python/uvloop ]] ||
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$tools/python" 'uvloop>=0.21' ||
  echo "tools: cannot install uvloop, the tests with it will skip" >&2
# rotel's program is linked with libpython, which Debian keeps apart from python3
rotel=$(compgen -G '.venv/lib/python3*/site-packages/rotel/rotel-agent' || true)
if [[ -n $rotel ]] && ! "$rotel" --version >/dev/null 2>&1; then
  version=$(.venv/bin/python -c 'import sys; print("{}.{}".format(*sys.version_info))')
  fetch rotel-agent "libpython$version"
  folder=$(find "$PWD/$tools/root" -name "libpython$version.so.1.0" -printf '%h' -quit 2>/dev/null || true)
  if [[ -n $folder ]]; then
    mkdir -p "$tools/root/usr/bin"
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec %q "$@"\n' "$folder" "$PWD/$rotel" >"$tools/root/usr/bin/rotel-agent"
    chmod +x "$tools/root/usr/bin/rotel-agent"
  fi
fi
