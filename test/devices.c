#include "test/devices.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "runtime/error.h"

Device *cpu, *gpu;

void open_devices(void) {
    cpu = device_open(DEVICE_CPU, 0);
    if (device_count_gpus() > 0) gpu = device_open(DEVICE_CUDA, 0);
}

void close_devices(void) {
    device_close(gpu);
    device_close(cpu);
}

bool no_gpu(void) {
    if (!gpu) print_message("no GPU here, or a build without CUDA\n");
    return !gpu;
}

void *put(Device *device, const void *values, size_t bytes) {
    void *memory = device_alloc(device, bytes);
    if (!memory) fail_msg("%s", error_message());
    device_upload(device, memory, values, bytes);
    return memory;
}
