"""GPU kernels whose memory counters have a closed form: ``python memory_patterns.py [streams]``, run under the analysis."""

import sys

import cupy as cp

BLOCKS, WARP = 64, 32
STRIDES = (1, 2, 8, 32)
BANK_STRIDES = range(1, 34)
WIDTHS = {4: "unsigned", 8: "uint2", 16: "uint4"}
LANES = range(1, 33)
CONTENDED = (1, 2, 4, 8, 16, 32)

HEAD = """
__device__ unsigned fold(unsigned v) { return v; }
__device__ unsigned fold(uint2 v) { return v.x ^ v.y; }
__device__ unsigned fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }
__device__ void fill(unsigned& v, unsigned i) { v = i; }
__device__ void fill(uint2& v, unsigned i) { v = make_uint2(i, i + 1); }
__device__ void fill(uint4& v, unsigned i) { v = make_uint4(i, i + 1, i + 2, i + 3); }
"""
STRIDED = """extern "C" __global__ void strided_{s}(const unsigned* a, unsigned* o) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x; o[i] = a[(long long)i * {s}] * 2; }}"""
# A store and a load of the neighbour's cell: both go through the same banks.
BANK = """extern "C" __global__ void bank_{w}_{s}(const unsigned* a, unsigned* o) {{
  __shared__ {t} cells[32 * {s}]; {t} v; unsigned lane = threadIdx.x;
  fill(v, lane + blockIdx.x); cells[lane * {s}] = v; __syncwarp();
  o[blockIdx.x * 32 + lane] = fold(cells[((lane + 1) & 31) * {s}]); }}"""
# Lanes in groups on one address: the phases of a wide load merge.
GROUP = """extern "C" __global__ void group_{w}_{g}(const unsigned* a, unsigned* o) {{
  __shared__ {t} cells[32]; {t} v; unsigned lane = threadIdx.x;
  fill(v, lane + blockIdx.x); cells[lane] = v; __syncwarp();
  o[blockIdx.x * 32 + lane] = fold(cells[lane / {g}]); }}"""
# Addresses shared by lanes 1, 2, 4 and 8 apart, without bank conflicts; and two lanes alone, in different phases.
SHARES = {"near": "lane >> 1", "next": "(lane >> 2) * 2 + (lane & 1)", "mod4": "lane & 3", "mod8": "lane & 7"}
SHARE = """extern "C" __global__ void share_{w}_{name}(const unsigned* a, unsigned* o) {{
  __shared__ {t} cells[32]; {t} v; unsigned lane = threadIdx.x;
  fill(v, lane + blockIdx.x); cells[lane] = v; __syncwarp();
  o[blockIdx.x * 32 + lane] = fold(cells[{unit}]); }}"""
LONE = """extern "C" __global__ void lone_{w}(const unsigned* a, unsigned* o) {{
  __shared__ {t} cells[32]; {t} v; unsigned lane = threadIdx.x;
  fill(v, lane + blockIdx.x); cells[lane] = v; __syncwarp();
  if (lane % (128 / {w}) == 0 && lane <= 128 / {w}) o[blockIdx.x * 32 + lane] = fold(cells[lane ^ 1]); }}"""
DIVERGENT = """extern "C" __global__ void lanes_{n}(const unsigned* a, unsigned* o) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x; if ((threadIdx.x & 31) < {n}) o[i] = a[i] * 2; }}"""
ATOMIC = """extern "C" __global__ void atomic_{n}(const unsigned* a, unsigned* o) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x; atomicMax(o + i / {n}, (unsigned)i); }}"""
# A warp copies 32 x 16 bytes to shared memory asynchronously.
ASYNC = """extern "C" __global__ void async_copy(const unsigned* a, unsigned* o) {
  __shared__ uint4 cells[32]; unsigned lane = threadIdx.x;
  unsigned to = (unsigned)__cvta_generic_to_shared(cells + lane);
  const unsigned* from = a + (blockIdx.x * 32 + lane) * 4;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory"); __syncwarp();
  o[blockIdx.x * 32 + lane] = fold(cells[31 - lane]); }"""
# One thread copies 4 KiB to shared memory by the bulk engine (compute capability 9.0 and newer).
BULK = """extern "C" __global__ void bulk_copy(const unsigned* a, unsigned* o) {
  __shared__ alignas(128) unsigned cells[1024]; __shared__ alignas(8) unsigned long long barrier;
  unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(cells);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(4096) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(to), "l"(a + blockIdx.x * 1024), "r"(4096), "r"(at) : "memory");
  }
  __syncwarp();
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(at) : "memory");
  o[blockIdx.x * 32 + threadIdx.x] = cells[threadIdx.x]; }"""
# The same shared loads without bank conflicts, in quiet and while global loads use the same data pipe.
PIPE = """extern "C" __global__ void pipe_{name}(const unsigned* a, unsigned* o) {{
  __shared__ unsigned cells[32]; unsigned lane = threadIdx.x, sum = 0;
  cells[lane] = lane; __syncwarp();
  for (int turn = 0; turn < 256; turn++) {{
    sum += ((volatile unsigned*)cells)[(lane + turn) & 31];
    {more}
  }}
  o[blockIdx.x * 32 + lane] = sum; }}"""
PIPES = {"quiet": "", "busy": "sum += __ldcg(a + ((blockIdx.x * 256 + turn) & 63) * 1024 + lane * 8);"}


def sources():
    """Return each GPU kernel's source by name."""
    found = {f"strided_{s}": STRIDED.format(s=s) for s in STRIDES}
    found |= {f"bank_{w}_{s}": BANK.format(w=w, s=s, t=t) for w, t in WIDTHS.items() for s in BANK_STRIDES}
    found |= {f"group_{w}_{g}": GROUP.format(w=w, g=g, t=t) for w, t in WIDTHS.items() for g in (2, 4, 8, 32)}
    for w, t in list(WIDTHS.items())[1:]:
        found |= {f"share_{w}_{name}": SHARE.format(w=w, t=t, name=name, unit=unit) for name, unit in SHARES.items()}
        found[f"lone_{w}"] = LONE.format(w=w, t=t)
    found |= {f"lanes_{n}": DIVERGENT.format(n=n) for n in LANES}
    found |= {f"atomic_{n}": ATOMIC.format(n=n) for n in CONTENDED}
    found |= {f"pipe_{name}": PIPE.format(name=name, more=more) for name, more in PIPES.items()}
    if int(cp.cuda.Device().compute_capability) >= 90:
        found["bulk_copy"] = BULK
    return found | {"async_copy": ASYNC}


def main(streams):
    """Launch every GPU kernel once on each stream, without waiting between launches."""
    found = sources()
    module = cp.RawModule(code=HEAD + "\n".join(found.values()))
    functions = {name: module.get_function(name) for name in found}
    a = cp.arange(BLOCKS * WARP * 32, dtype=cp.uint32)
    outputs = [cp.zeros(BLOCKS * WARP, dtype=cp.uint32) for _ in range(streams)]
    chosen = [cp.cuda.Stream(non_blocking=True) for _ in range(streams)]
    cp.cuda.Device().synchronize()
    for function in functions.values():
        for stream, o in zip(chosen, outputs, strict=True):
            with stream:
                function((BLOCKS,), (WARP,), (a, o))
    cp.cuda.Device().synchronize()
    sys.stdout.write("patterns done\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
