/* What each kind of device provides, and the books that device.c keeps for all kinds. */
#ifndef RUNTIME_DEVICE_IMPL_H
#define RUNTIME_DEVICE_IMPL_H

#include "runtime/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct OpenDevice OpenDevice;

typedef struct {
    int (*count)(void);
    /* Fills in name, architecture, processors and stream; the rest of the Device is set. False with
     * error_message(). */
    bool (*open)(OpenDevice *device);
    void (*close)(OpenDevice *device);
    /* NULL, without a message, if there is not enough. bytes > 0. */
    void *(*alloc)(OpenDevice *device, size_t bytes);
    void (*free)(void *memory);
    void (*upload)(OpenDevice *device, void *to, const void *from, size_t bytes);
    void (*download)(OpenDevice *device, void *to, const void *from, size_t bytes);
    void (*copy)(OpenDevice *device, void *to, const void *from, size_t bytes);
    void (*zero)(OpenDevice *device, void *memory, size_t bytes);
    /* Slots 0 … DEVICE_FETCHES - 1 of DEVICE_FETCH_BYTES: begins to fill one, and waits for it. */
    void (*fetch)(OpenDevice *device, size_t slot, const void *from, size_t bytes);
    const void *(*fetched)(OpenDevice *device, size_t slot);
    void (*repeat)(OpenDevice *device, DeviceGraph **graph, void (*work)(void *), void *argument);
    void (*graph_free)(DeviceGraph *graph);
    void (*synchronize)(OpenDevice *device);
    void (*memory)(OpenDevice *device, size_t *available, size_t *total);
} DeviceOperations;

typedef struct Allocation {
    void *memory;
    size_t bytes;
    struct Allocation *next;
} Allocation;

struct OpenDevice {
    Device device; /* first: a Device * that device_open gave out is an OpenDevice * */
    const DeviceOperations *operations;
    Allocation *allocations;
    size_t live, peak; /* bytes */
    size_t fetches, received; /* so far */
    void *state;              /* of the operations */
};

extern const DeviceOperations device_cuda; /* only in a program built with CUDA */

#ifdef __cplusplus
}
#endif
#endif
