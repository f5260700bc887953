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
