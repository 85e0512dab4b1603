/* The devices of a test program, and memory on them. */
#ifndef TEST_DEVICES_H
#define TEST_DEVICES_H

#include <stdbool.h>
#include <stddef.h>

#include "runtime/device.h"

extern Device *cpu, *gpu; /* gpu is NULL where there is none */
void open_devices(void);
void close_devices(void);

/* Whether what needs a GPU is to be skipped; a line says so. */
bool no_gpu(void);

/* Device memory of these bytes; the test fails if there is none. */
void *put(Device *device, const void *values, size_t bytes);

#endif
