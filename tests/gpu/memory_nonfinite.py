"""Stores of NaN and infinities whose numbers are known: ``python memory_nonfinite.py cupy|torch``, run under the analysis."""

import sys

BLOCKS, WARP = 8, 32
KERNELS = r"""
#define NAN_BITS __int_as_float(0x7fffffff)
extern "C" __global__ void clean(float* o) { int i = blockIdx.x * blockDim.x + threadIdx.x; o[i] = i; }
// every 8th number is NaN, every 16th of the others that follow them infinite
extern "C" __global__ void every(float* o) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  o[i] = i % 8 == 0 ? NAN_BITS : i % 16 == 1 ? __int_as_float(0x7f800000) : i; }
extern "C" __global__ void wide(float4* o) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; o[i] = make_float4(i, NAN_BITS, i, __int_as_float(0xff800000)); }
extern "C" __global__ void half_warp(float* o) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; if (threadIdx.x < 16) o[i] = NAN_BITS; }
extern "C" __global__ void one(float* o) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; o[i] = i == 77 ? NAN_BITS : i; }
extern "C" __global__ void integers(int* o) { int i = blockIdx.x * blockDim.x + threadIdx.x; o[i] = -1; }
extern "C" __global__ void doubles(double* o) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; o[i] = i % 4 ? i : __longlong_as_double(0x7ff8000000000000LL); }
extern "C" __global__ void loads(const float* a, float* o) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; if (a[i] != a[i]) o[i] = 1; }
"""


def with_cupy(report):
    """Launch each GPU kernel once; report the address of what "one" stores."""
    import cupy as cp

    module = cp.RawModule(code=KERNELS)
    numbers = BLOCKS * WARP
    o = cp.zeros(4 * numbers, dtype=cp.float64)
    cp.cuda.Device().synchronize()
    for name in ("clean", "one", "every", "wide", "half_warp", "integers", "doubles"):
        module.get_function(name)((BLOCKS,), (WARP,), (o,))
    a = cp.full(numbers, cp.nan, dtype=cp.float32)
    module.get_function("loads")((BLOCKS,), (WARP,), (a, o))
    cp.cuda.Device().synchronize()
    report(o.data.ptr + 77 * 4)


def with_torch(report):
    """Divide by a variance of 0 in the third layer: its own GPU kernel is the first that stores NaN."""
    import torch

    class Norm(torch.nn.Module):
        def forward(self, x):
            return (x - x.mean()) / x.std()

    net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Threshold(100.0, 0.0), Norm(), torch.nn.Tanh()).cuda()
    x = torch.arange(1024, dtype=torch.float32, device="cuda") / 1024
    torch.cuda.synchronize()
    y = net(x)
    torch.cuda.synchronize()
    assert torch.isnan(y).all()
    report(0)


if __name__ == "__main__":
    {"cupy": with_cupy, "torch": with_torch}[sys.argv[1]](lambda address: sys.stderr.write(f"address {address}\n"))
