/* Exports the CUDA driver's names, so that probes on libcuda.so.1 can be tried without a GPU. */
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default"), noinline))

static volatile uint64_t calls;

static int wait_ns(long ns)
{
    struct timespec span = {0, ns};

    calls++;
    return ns ? nanosleep(&span, NULL) : 0;
}

#define CALL(name) EXPORT int name(void) { return wait_ns(0) + 0 * __COUNTER__; }
#define COPY(name) EXPORT int name(uint64_t to, uint64_t from, size_t bytes) { return wait_ns(0) + 0 * (int)(to + from + bytes); }
#define ALLOC(name) EXPORT int name(void *out, size_t bytes) { return wait_ns(0) + 0 * (int)(bytes + (size_t)out); }
#define SYNC(name) EXPORT int name(void *what) { return wait_ns(300000) + 0 * (what != NULL); }

CALL(cuLaunchKernel) CALL(cuLaunchKernel_ptsz) CALL(cuLaunchKernelEx) CALL(cuLaunchKernelEx_ptsz)
CALL(cuLaunchCooperativeKernel) CALL(cuLaunchCooperativeKernel_ptsz)
CALL(cuGraphLaunch) CALL(cuGraphLaunch_ptsz)
COPY(cuMemcpyHtoD_v2) COPY(cuMemcpyHtoD_v2_ptds) COPY(cuMemcpyDtoH_v2) COPY(cuMemcpyDtoH_v2_ptds)
COPY(cuMemcpyDtoD_v2) COPY(cuMemcpyDtoD_v2_ptds) COPY(cuMemcpyHtoDAsync_v2) COPY(cuMemcpyHtoDAsync_v2_ptsz)
COPY(cuMemcpyDtoHAsync_v2) COPY(cuMemcpyDtoHAsync_v2_ptsz) COPY(cuMemcpyDtoDAsync_v2) COPY(cuMemcpyDtoDAsync_v2_ptsz)
COPY(cuMemcpy) COPY(cuMemcpy_ptds) COPY(cuMemcpyAsync) COPY(cuMemcpyAsync_ptsz)
COPY(cuMemcpy2D_v2) COPY(cuMemcpy2D_v2_ptds) COPY(cuMemcpy2DAsync_v2) COPY(cuMemcpy2DAsync_v2_ptsz)
COPY(cuMemcpy3D_v2) COPY(cuMemcpy3D_v2_ptds) COPY(cuMemcpy3DAsync_v2) COPY(cuMemcpy3DAsync_v2_ptsz)
COPY(cuMemsetD8_v2) COPY(cuMemsetD8_v2_ptds) COPY(cuMemsetD16_v2) COPY(cuMemsetD16_v2_ptds)
COPY(cuMemsetD32_v2) COPY(cuMemsetD32_v2_ptds) COPY(cuMemsetD8Async) COPY(cuMemsetD8Async_ptsz)
COPY(cuMemsetD16Async) COPY(cuMemsetD16Async_ptsz) COPY(cuMemsetD32Async) COPY(cuMemsetD32Async_ptsz)
COPY(cuMemcpyAtoA_v2) COPY(cuMemcpyAtoA_v2_ptds) COPY(cuMemcpyAtoD_v2) COPY(cuMemcpyAtoD_v2_ptds)
COPY(cuMemcpyAtoH_v2) COPY(cuMemcpyAtoH_v2_ptds) COPY(cuMemcpyDtoA_v2) COPY(cuMemcpyDtoA_v2_ptds)
COPY(cuMemcpyHtoA_v2) COPY(cuMemcpyHtoA_v2_ptds) COPY(cuMemcpyAtoHAsync_v2) COPY(cuMemcpyAtoHAsync_v2_ptsz)
COPY(cuMemcpyHtoAAsync_v2) COPY(cuMemcpyHtoAAsync_v2_ptsz) COPY(cuMemcpy2DUnaligned_v2)
COPY(cuMemcpy2DUnaligned_v2_ptds) COPY(cuMemcpyPeer) COPY(cuMemcpyPeer_ptds) COPY(cuMemcpyPeerAsync)
COPY(cuMemcpyPeerAsync_ptsz) COPY(cuMemcpy3DPeer) COPY(cuMemcpy3DPeer_ptds) COPY(cuMemcpy3DPeerAsync)
COPY(cuMemcpy3DPeerAsync_ptsz) COPY(cuMemcpyBatchAsync) COPY(cuMemcpyBatchAsync_ptsz) COPY(cuMemcpyBatchAsync_v2)
COPY(cuMemcpyBatchAsync_v2_ptsz) COPY(cuMemcpy3DBatchAsync) COPY(cuMemcpy3DBatchAsync_ptsz)
COPY(cuMemcpy3DBatchAsync_v2) COPY(cuMemcpy3DBatchAsync_v2_ptsz)
COPY(cuMemsetD2D8_v2) COPY(cuMemsetD2D8_v2_ptds) COPY(cuMemsetD2D16_v2) COPY(cuMemsetD2D16_v2_ptds)
COPY(cuMemsetD2D32_v2) COPY(cuMemsetD2D32_v2_ptds) COPY(cuMemsetD2D8Async) COPY(cuMemsetD2D8Async_ptsz)
COPY(cuMemsetD2D16Async) COPY(cuMemsetD2D16Async_ptsz) COPY(cuMemsetD2D32Async) COPY(cuMemsetD2D32Async_ptsz)
ALLOC(cuMemAllocFromPoolAsync) ALLOC(cuMemAllocFromPoolAsync_ptsz)
ALLOC(cuMemAlloc_v2) ALLOC(cuMemAllocAsync) ALLOC(cuMemAllocAsync_ptsz)
CALL(cuMemFree_v2) CALL(cuMemFreeAsync) CALL(cuMemFreeAsync_ptsz)
SYNC(cuStreamSynchronize) SYNC(cuStreamSynchronize_ptsz) SYNC(cuEventSynchronize) SYNC(cuCtxSynchronize) SYNC(cuCtxSynchronize_v2)

/* A caller in C, for loads that Python is too slow for. */
EXPORT void pasta_flood(long count)
{
    while (count--)
        cuLaunchKernel();
}
