/* One GPU: cudaMalloc, one stream, and uploads through a ring of pinned memory. */
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime/device_impl.h"
#include "runtime/error.h"

struct DeviceGraph {
    cudaGraphExec_t executable; /* NULL until the work has been recorded */
};

namespace {

/* Uploads are copied into the next slot of pinned memory and travel from there, so the source may
 * be reused at once, whatever kind of memory it is, and the host waits only when every slot is
 * still travelling. The slots hold the tokens of a few micro-batches. */
constexpr size_t slot_bytes = (size_t)1 << 20;
constexpr int slots = 8;

struct Staging {
    char *memory; /* (slots, slot_bytes), pinned */
    cudaEvent_t arrived[slots];
    int next;
    char *fetched; /* (DEVICE_FETCHES, DEVICE_FETCH_BYTES), pinned */
    cudaEvent_t fetch_arrived[DEVICE_FETCHES];
};

Staging *staging(OpenDevice *device) { return static_cast<Staging *>(device->state); }

cudaStream_t stream(OpenDevice *device) {
    return static_cast<cudaStream_t>(device->device.stream);
}

/* Clears the error of a call whose failure is an answer, so that later checks do not see it. */
cudaError_t answer(cudaError_t status) {
    if (status != cudaSuccess) cudaGetLastError();
    return status;
}

/* Why no GPU answers. A missing driver and one that is too old give the same status. */
void explain_no_gpu(cudaError_t status) {
    int driver = 0, runtime = 0;
    answer(cudaDriverGetVersion(&driver));
    answer(cudaRuntimeGetVersion(&runtime));
    if (status == cudaErrorInsufficientDriver && driver == 0)
        error_set("no NVIDIA driver answers on this machine; install one (nvidia-smi shows "
                  "whether it works), or use --device=cpu");
    else if (status == cudaErrorInsufficientDriver)
        error_set("the NVIDIA driver supports CUDA %d.%d and this program was built with CUDA "
                  "%d.%d; install a newer driver or build with an older toolkit, or use "
                  "--device=cpu",
                  driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    else if (status == cudaErrorNoDevice || status == cudaSuccess) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        error_set("the NVIDIA driver finds no GPU%s%s%s; use --device=cpu", visible
                  ? " (CUDA_VISIBLE_DEVICES is \"" : "", visible ? visible : "",
                  visible ? "\")" : "");
    } else
        error_set("no GPU can be used: %s (%s); use --device=cpu", cudaGetErrorName(status),
                  cudaGetErrorString(status));
}

int cuda_count() {
    int count = 0;
    return answer(cudaGetDeviceCount(&count)) == cudaSuccess ? count : 0;
}

__global__ void any_kernel() {}

/* Whether this GPU can run what was compiled: every source is built for the same architectures. */
bool check_architecture(const Device *gpu) {
    cudaFuncAttributes attributes;
    cudaError_t status = answer(cudaFuncGetAttributes(&attributes, any_kernel));
    if (status == cudaSuccess) return true;
    const int built[] = {__CUDA_ARCH_LIST__};
    char list[256] = "";
    for (int architecture : built) {
        size_t length = strlen(list);
        snprintf(list + length, sizeof list - length, " sm_%d", architecture / 10);
    }
    return error_set("GPU %d (%s) is sm_%d and this program was built for%s: %s; run make clean; "
                     "make on the machine with this GPU, or use --device=cpu",
                     gpu->ordinal, gpu->name, gpu->architecture, list, cudaGetErrorString(status));
}

/* The calls that first touch the GPU, which fail when others have filled or reserved it. */
cudaError_t acquire(OpenDevice *device, cudaDeviceProp *properties) {
    Device *gpu = &device->device;
    cudaError_t status = cudaSetDevice(gpu->ordinal);
    if (status == cudaSuccess) status = cudaGetDeviceProperties(properties, gpu->ordinal);
    cudaStream_t created = nullptr;
    if (status == cudaSuccess)
        status = cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking);
    gpu->stream = created;
    if (status == cudaSuccess)
        status = cudaMallocHost(&staging(device)->memory, slots * slot_bytes);
    for (int i = 0; i < slots && status == cudaSuccess; i++)
        status = cudaEventCreateWithFlags(&staging(device)->arrived[i], cudaEventDisableTiming);
    if (status == cudaSuccess)
        status = cudaMallocHost(&staging(device)->fetched, DEVICE_FETCHES * DEVICE_FETCH_BYTES);
    for (int i = 0; i < DEVICE_FETCHES && status == cudaSuccess; i++)
        status =
            cudaEventCreateWithFlags(&staging(device)->fetch_arrived[i], cudaEventDisableTiming);
    return answer(status);
}

void cuda_close(OpenDevice *device) {
    Staging *ring = staging(device);
    for (cudaEvent_t event : ring->arrived)
        if (event) CUDA_CHECK(cudaEventDestroy(event));
    for (cudaEvent_t event : ring->fetch_arrived)
        if (event) CUDA_CHECK(cudaEventDestroy(event));
    if (ring->memory) CUDA_CHECK(cudaFreeHost(ring->memory));
    if (ring->fetched) CUDA_CHECK(cudaFreeHost(ring->fetched));
    if (stream(device)) CUDA_CHECK(cudaStreamDestroy(stream(device)));
    free(ring);
}

bool cuda_open(OpenDevice *device) {
    Device *gpu = &device->device;
    int count = 0;
    cudaError_t status = answer(cudaGetDeviceCount(&count));
    if (status != cudaSuccess || count == 0) {
        explain_no_gpu(status);
        return false;
    }
    if (gpu->ordinal < 0 || gpu->ordinal >= count)
        return error_set("there is no GPU %d: this machine has %d, numbered from 0 (in the order "
                         "of CUDA_VISIBLE_DEVICES if that is set)",
                         gpu->ordinal, count);

    device->state = calloc(1, sizeof(Staging));
    if (!device->state) return error_set("not enough host memory to open GPU %d", gpu->ordinal);
    cudaDeviceProp properties;
    status = acquire(device, &properties);
    if (status != cudaSuccess) {
        error_set("GPU %d cannot be used: %s (%s); nvidia-smi shows whether another program holds "
                  "it",
                  gpu->ordinal, cudaGetErrorName(status), cudaGetErrorString(status));
        cuda_close(device);
        return false;
    }
    snprintf(gpu->name, sizeof gpu->name, "%.127s", properties.name);
    gpu->architecture = properties.major * 10 + properties.minor;
    gpu->processors = properties.multiProcessorCount;
    if (check_architecture(gpu)) return true;
    cuda_close(device);
    return false;
}

void *cuda_alloc(OpenDevice *device, size_t bytes) {
    void *memory = nullptr;
    CUDA_CHECK(cudaSetDevice(device->device.ordinal));
    cudaError_t status = cudaMalloc(&memory, bytes);
    if (status == cudaErrorMemoryAllocation) {
        answer(status);
        return nullptr;
    }
    CUDA_CHECK(status);
    return memory;
}

void cuda_free(void *memory) { CUDA_CHECK(cudaFree(memory)); }

void cuda_upload(OpenDevice *device, void *to, const void *from, size_t bytes) {
    Staging *ring = staging(device);
    for (size_t at = 0; at < bytes; at += slot_bytes) {
        size_t piece = bytes - at < slot_bytes ? bytes - at : slot_bytes;
        char *slot = ring->memory + (size_t)ring->next * slot_bytes;
        cudaEvent_t arrived = ring->arrived[ring->next];
        CUDA_CHECK(cudaEventSynchronize(arrived));
        memcpy(slot, static_cast<const char *>(from) + at, piece);
        CUDA_CHECK(cudaMemcpyAsync(static_cast<char *>(to) + at, slot, piece,
                                   cudaMemcpyHostToDevice, stream(device)));
        CUDA_CHECK(cudaEventRecord(arrived, stream(device)));
        ring->next = (ring->next + 1) % slots;
    }
}

void cuda_synchronize(OpenDevice *device) { CUDA_CHECK(cudaStreamSynchronize(stream(device))); }

void cuda_download(OpenDevice *device, void *to, const void *from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream(device)));
    cuda_synchronize(device);
}

void cuda_copy(OpenDevice *device, void *to, const void *from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream(device)));
}

void cuda_zero(OpenDevice *device, void *memory, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream(device)));
}

void cuda_fetch(OpenDevice *device, size_t slot, const void *from, size_t bytes) {
    Staging *ring = staging(device);
    CUDA_CHECK(cudaMemcpyAsync(ring->fetched + slot * DEVICE_FETCH_BYTES, from, bytes,
                               cudaMemcpyDeviceToHost, stream(device)));
    CUDA_CHECK(cudaEventRecord(ring->fetch_arrived[slot], stream(device)));
}

const void *cuda_fetched(OpenDevice *device, size_t slot) {
    Staging *ring = staging(device);
    CUDA_CHECK(cudaEventSynchronize(ring->fetch_arrived[slot]));
    return ring->fetched + slot * DEVICE_FETCH_BYTES;
}

/* The first run is an ordinary one: what a kernel or library sets up when it is first called could
 * not be recorded. */
void cuda_repeat(OpenDevice *device, DeviceGraph **graph, void (*work)(void *), void *argument) {
    if (*graph == nullptr) {
        *graph = static_cast<DeviceGraph *>(calloc(1, sizeof **graph));
        if (*graph == nullptr) error_fatal(__FILE__, __LINE__, "no host memory for a graph");
        work(argument);
        return;
    }
    if ((*graph)->executable == nullptr) {
        cudaGraph_t recorded;
        CUDA_CHECK(cudaStreamBeginCapture(stream(device), cudaStreamCaptureModeThreadLocal));
        work(argument);
        CUDA_CHECK(cudaStreamEndCapture(stream(device), &recorded));
        CUDA_CHECK(cudaGraphInstantiate(&(*graph)->executable, recorded, 0));
        CUDA_CHECK(cudaGraphDestroy(recorded));
    }
    CUDA_CHECK(cudaGraphLaunch((*graph)->executable, stream(device)));
}

void cuda_graph_free(DeviceGraph *graph) {
    if (graph->executable) CUDA_CHECK(cudaGraphExecDestroy(graph->executable));
    free(graph);
}

void cuda_memory(OpenDevice *device, size_t *available, size_t *total) {
    CUDA_CHECK(cudaSetDevice(device->device.ordinal));
    CUDA_CHECK(cudaMemGetInfo(available, total));
}

} /* namespace */

extern "C" const DeviceOperations device_cuda = {
    /*count=*/cuda_count,
    /*open=*/cuda_open,
    /*close=*/cuda_close,
    /*alloc=*/cuda_alloc,
    /*free=*/cuda_free,
    /*upload=*/cuda_upload,
    /*download=*/cuda_download,
    /*copy=*/cuda_copy,
    /*zero=*/cuda_zero,
    /*fetch=*/cuda_fetch,
    /*fetched=*/cuda_fetched,
    /*repeat=*/cuda_repeat,
    /*graph_free=*/cuda_graph_free,
    /*synchronize=*/cuda_synchronize,
    /*memory=*/cuda_memory,
};
