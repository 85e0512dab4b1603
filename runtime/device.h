/* A device: the CPU or one GPU, its memory, its ordered queue of work, and scratch.
 *
 * Work given to a device runs in the order given; on a GPU it runs later, on device->stream, and
 * the host waits only in device_download, device_receive and
 * device_synchronize. A process opens each device once. */
#ifndef RUNTIME_DEVICE_H
#define RUNTIME_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { DEVICE_CPU, DEVICE_CUDA } DeviceType;
typedef enum { TYPE_F32, TYPE_F64, TYPE_BF16, TYPE_I32 } DataType;

size_t type_bytes(DataType type);     /* 0 if there is no such type */
const char *type_name(DataType type); /* "fp32", "fp64", "bf16", "int32"; else "unknown" */
/* The type of sums, statistics and gradients that goes with tensors of this type: float, or double
 * for double. */
DataType type_accumulator(DataType type);

typedef struct {
    DeviceType type;
    int ordinal;      /* GPU number; 0 on the CPU */
    char name[128];   /* "NVIDIA H200", or the processor's name */
    int architecture; /* compute capability times 10 (90 for sm_90); 0 on the CPU */
    int processors;   /* multiprocessors, or the threads OpenMP will use */
    void *stream;     /* cudaStream_t; NULL on the CPU */
    void *scratch;    /* scratch_bytes of device memory, 256-byte aligned, that any one layer */
    size_t
        scratch_bytes; /* call may overwrite; set by device_reserve_scratch                     */
} Device;

/* The number of usable GPUs; 0 if the program was built without CUDA or no driver answers. */
int device_count_gpus(void);

/* Opens the CPU, or GPU number `ordinal`. NULL with error_message() if there is none. */
Device *device_open(DeviceType type, int ordinal);
/* Waits for the work, frees the scratch and the device. NULL is allowed. */
void device_close(Device *device);

/* Device memory, 256-byte aligned, uninitialised. NULL with error_message() if there is not enough;
 * bytes = 0 gives a pointer that must be freed like any other. */
void *device_alloc(Device *device, size_t bytes);
void device_free(Device *device, void *memory);

/* Memory is taken from the device in multiples of this: what a plan rounds its arenas up to. */
size_t device_granularity(const Device *device);

/* Makes device->scratch at least this large; keeps a larger one. False if there is no memory. */
bool device_reserve_scratch(Device *device, size_t bytes);

/* Host to device. The source may be reused as soon as the call returns. */
void device_upload(Device *device, void *to, const void *from, size_t bytes);
/* Device to host, after all work given so far; waits. */
void device_download(Device *device, void *to, const void *from, size_t bytes);
void device_copy(Device *device, void *to, const void *from, size_t bytes);

/* Device to host while later work goes on: device_fetch copies after the work given so far, and
 * device_receive gives the bytes of the oldest fetch not received yet, waiting for that one only.
 * At most DEVICE_FETCHES are under way. */
#define DEVICE_FETCHES 8
#define DEVICE_FETCH_BYTES 4096
void device_fetch(Device *device, const void *from, size_t bytes);
void device_receive(Device *device, void *to, size_t bytes);
/* How many steps of a loop to give before receiving the first one's result, so that the device
 * never waits for the host: 1 where work is done as it is given. */
size_t device_steps_ahead(const Device *device);

/* Calls work(argument), which gives the device the same work each time and neither uploads nor
 * downloads. A GPU records it at the second call and from then on replays the record, at the price
 * of one launch, without calling. *graph is NULL before the first time. */
typedef struct DeviceGraph DeviceGraph;
void device_repeat(Device *device, DeviceGraph **graph, void (*work)(void *argument),
                   void *argument);
void device_graph_free(Device *device, DeviceGraph *graph); /* NULL is allowed */

void device_zero(Device *device, void *memory, size_t bytes);
void device_synchronize(Device *device);

/* Bytes that can still be allocated and bytes in all: free and total memory of the GPU, available
 * and total RAM for the CPU. */
void device_memory(Device *device, size_t *available, size_t *total);

/* The largest sum of live device_alloc bytes so far in this process, for checking plans. */
size_t device_peak_allocated(const Device *device);

#ifdef __cplusplus
}
#endif
#endif
