#!/usr/bin/env bash
# Prepares this host for the eBPF tests: tracefs, libbpf, clang, and bcc with kernel headers. Changes the host, so it runs only as
# root and only when asked: PASTA_TEST_PREPARE_HOST=1.
set -euo pipefail
[[ "${PASTA_TEST_PREPARE_HOST:-}" == 1 ]] || exit 0
[[ $(id -u) == 0 ]] || { echo "prepare_host: not root; eBPF tests will skip" >&2; exit 0; }
mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing || echo "prepare_host: no tracefs" >&2
packages=()
[[ -e /usr/lib/python3/dist-packages/bcc ]] || packages+=(python3-bpfcc)
compgen -G '/usr/src/linux-headers-*-common' >/dev/null || packages+=(linux-headers-amd64)
command -v clang >/dev/null || compgen -G '/usr/bin/clang-[0-9]*' >/dev/null || packages+=(clang)
command -v llvm-strip >/dev/null || compgen -G '/usr/bin/llvm-strip-[0-9]*' >/dev/null || packages+=(llvm)
[[ -e /usr/include/bpf/bpf_helpers.h ]] || packages+=(libbpf-dev)
if ((${#packages[@]})); then
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"; } >/dev/null 2>&1 ||
    echo "prepare_host: could not install ${packages[*]}; the tests that need them will skip" >&2
fi
# bcc wants the headers under the running kernel's name; Debian splits them: build = -amd64, source = -common
modules="/lib/modules/$(uname -r)"
if [[ ! -e $modules/build ]]; then
  build=$(compgen -G '/usr/src/linux-headers-*-amd64' | sort -V | tail -n 1 || true)
  source=$(compgen -G '/usr/src/linux-headers-*-common' | sort -V | tail -n 1 || true)
  if [[ -n $build && -n $source ]]; then mkdir -p "$modules"; ln -sfn "$build" "$modules/build"; ln -sfn "$source" "$modules/source"; fi
fi
