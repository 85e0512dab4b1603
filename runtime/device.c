/* Devices: the CPU here, a GPU in device_cuda.cu, behind one table of operations each. */
#include "runtime/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "runtime/device_impl.h"
#include "runtime/error.h"

#define ALIGNMENT 256

typedef struct {
    const char *name;
    size_t bytes;
    DataType accumulator;
} TypeFacts;

static const TypeFacts types[] = {
    [TYPE_F32] = {"fp32", 4, TYPE_F32},
    [TYPE_F64] = {"fp64", 8, TYPE_F64},
    [TYPE_BF16] = {"bf16", 2, TYPE_F32},
    [TYPE_I32] = {"int32", 4, TYPE_I32},
};

static TypeFacts facts(DataType type) {
    bool known = (size_t)type < sizeof types / sizeof types[0];
    return known ? types[type] : (TypeFacts){"unknown", 0, type};
}

size_t type_bytes(DataType type) { return facts(type).bytes; }
const char *type_name(DataType type) { return facts(type).name; }
DataType type_accumulator(DataType type) { return facts(type).accumulator; }

/* The CPU: work is done when the call returns. */

/* The number after `field` at the start of a line of a /proc or /sys file. */
static size_t read_number(const char *path, const char *field, size_t otherwise) {
    FILE *file = fopen(path, "r");
    if (!file) return otherwise;
    char line[256];
    size_t number = otherwise;
    while (fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0 &&
            sscanf(line + strlen(field), "%zu", &number) == 1)
            break;
    fclose(file);
    return number;
}

/* Lowers the figures to the limit of one control group. Its page cache is not counted as used: the
 * kernel gives it back on demand. */
static void limit_by_group(const char *group, const char *limit_file, const char *used_field,
                           size_t *available, size_t *total) {
    char path[1280];
    snprintf(path, sizeof path, "%s/%s", group, limit_file);
    size_t limit = read_number(path, "", SIZE_MAX);
    if (limit >= *total) return;
    snprintf(path, sizeof path, "%s/memory.stat", group);
    size_t used = read_number(path, used_field, 0);
    size_t left = limit > used ? limit - used : 0;
    *total = limit;
    if (left < *available) *available = left;
}

/* The limits of this process's control group and of those around it, in either version's files. */
static void limit_by_groups(size_t *available, size_t *total) {
    FILE *file = fopen("/proc/self/cgroup", "r");
    if (!file) return;
    char line[1024];
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *name = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!name) continue;
        *name++ = '\0';
        bool unified = controllers[1] == '\0';
        if (!unified && strcmp(controllers + 1, "memory") != 0) continue;
        char group[1200];
        const char *mount = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        snprintf(group, sizeof group, "%s%s", mount, name);
        while (strlen(group) >= strlen(mount)) {
            limit_by_group(group, unified ? "memory.max" : "memory.limit_in_bytes",
                           unified ? "anon" : "total_rss", available, total);
            *strrchr(group, '/') = '\0';
        }
    }
    fclose(file);
}

static void cpu_memory(OpenDevice *device, size_t *available, size_t *total) {
    (void)device;
    *total = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    *available = 1024 * read_number("/proc/meminfo", "MemAvailable:", *total / 1024);
    limit_by_groups(available, total);
}

static int cpu_count(void) { return 1; }

static bool cpu_open(OpenDevice *device) {
    Device *cpu = &device->device;
    snprintf(cpu->name, sizeof cpu->name, "CPU");
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "model name : %127[^\n]", cpu->name) == 1) break;
    if (file) fclose(file);
    cpu->processors = 1;
#ifdef _OPENMP
    cpu->processors = omp_get_max_threads();
#endif
    return true;
}

static void cpu_close(OpenDevice *device) { (void)device; }

/* Linux grants more memory than there is and kills the process when it is touched, so what is there
 * is asked first. Large blocks are fresh mappings, which cost nothing until touched. */
static void *cpu_alloc(OpenDevice *device, size_t bytes) {
    size_t available, total;
    cpu_memory(device, &available, &total);
    if (bytes > available) return NULL;
    return aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

static void cpu_copy(OpenDevice *device, void *to, const void *from, size_t bytes) {
    (void)device;
    memcpy(to, from, bytes);
}

/* One thread cannot fill the memory's bandwidth with an arena of gradients. */
static void cpu_zero(OpenDevice *device, void *memory, size_t bytes) {
    (void)device;
    const size_t piece = (size_t)1 << 20;
#pragma omp parallel for schedule(static)
    for (size_t at = 0; at < bytes; at += piece)
        memset((char *)memory + at, 0, bytes - at < piece ? bytes - at : piece);
}

static void cpu_synchronize(OpenDevice *device) { (void)device; }

static char cpu_slots[DEVICE_FETCHES][DEVICE_FETCH_BYTES];

static void cpu_fetch(OpenDevice *device, size_t slot, const void *from, size_t bytes) {
    (void)device;
    memcpy(cpu_slots[slot], from, bytes);
}

static const void *cpu_fetched(OpenDevice *device, size_t slot) {
    (void)device;
    return cpu_slots[slot];
}

static void cpu_repeat(OpenDevice *device, DeviceGraph **graph, void (*work)(void *),
                       void *argument) {
    (void)device;
    (void)graph;
    work(argument);
}

static void cpu_graph_free(DeviceGraph *graph) { (void)graph; }

static const DeviceOperations device_cpu = {
    .count = cpu_count,
    .open = cpu_open,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = free,
    .upload = cpu_copy,
    .download = cpu_copy,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .fetch = cpu_fetch,
    .fetched = cpu_fetched,
    .repeat = cpu_repeat,
    .graph_free = cpu_graph_free,
    .synchronize = cpu_synchronize,
    .memory = cpu_memory,
};

static const DeviceOperations *const kinds[] = {
    [DEVICE_CPU] = &device_cpu,
#ifdef TILEGPT_CUDA
    [DEVICE_CUDA] = &device_cuda,
#else
    [DEVICE_CUDA] = NULL,
#endif
};

/* What is common to all. */

static OpenDevice *opened(Device *device) { return (OpenDevice *)device; }

static void *allocate_host(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (!memory) error_fatal(__FILE__, __LINE__, "calloc of %zu bytes failed", bytes);
    return memory;
}

int device_count_gpus(void) { return kinds[DEVICE_CUDA] ? kinds[DEVICE_CUDA]->count() : 0; }

Device *device_open(DeviceType type, int ordinal) {
    if (!kinds[type]) {
        error_set(
            "this program was built without CUDA; use the CPU (--device=cpu), or install the CUDA "
            "toolkit and run make CUDA=1");
        return NULL;
    }
    OpenDevice *device = allocate_host(sizeof *device);
    device->operations = kinds[type];
    device->device.type = type;
    device->device.ordinal = type == DEVICE_CPU ? 0 : ordinal;
    if (device->operations->open(device)) return &device->device;
    free(device);
    return NULL;
}

void device_close(Device *device) {
    if (!device) return;
    device_synchronize(device);
    device_free(device, device->scratch);
    opened(device)->operations->close(opened(device));
    free(device);
}

/* "1.50 GiB", in MiB below 1 GiB. */
static const char *format_bytes(size_t bytes, char text[32]) {
    const double mib = 1048576, gib = 1024 * mib;
    if ((double)bytes < gib)
        snprintf(text, 32, "%.2f MiB", (double)bytes / mib);
    else
        snprintf(text, 32, "%.2f GiB", (double)bytes / gib);
    return text;
}

void *device_alloc(Device *public_device, size_t bytes) {
    OpenDevice *device = opened(public_device);
    void *memory = device->operations->alloc(device, bytes ? bytes : 1);
    if (!memory) {
        size_t available, total;
        char wanted_text[32], available_text[32], total_text[32];
        device_memory(public_device, &available, &total);
        error_set(
            "not enough memory on %s: %s wanted, %s free of %s; a smaller batch, a shorter "
            "sequence or a smaller model needs less",
            public_device->name, format_bytes(bytes, wanted_text),
            format_bytes(available, available_text), format_bytes(total, total_text));
        return NULL;
    }
    Allocation *allocation = allocate_host(sizeof *allocation);
    *allocation = (Allocation){memory, bytes, device->allocations};
    device->allocations = allocation;
    device->live += bytes;
    if (device->live > device->peak) device->peak = device->live;
    return memory;
}

void device_free(Device *public_device, void *memory) {
    if (!memory) return;
    OpenDevice *device = opened(public_device);
    Allocation **link = &device->allocations;
    while (*link && (*link)->memory != memory) link = &(*link)->next;
    Allocation *allocation = *link;
    if (!allocation)
        error_fatal(__FILE__, __LINE__, "device_free of %p, which %s did not allocate", memory,
                    public_device->name);
    *link = allocation->next;
    device->live -= allocation->bytes;
    free(allocation);
    device->operations->free(memory);
}

/* The old scratch is freed first, so that room for both is never needed. */
size_t device_granularity(const Device *device) {
    return device->type == DEVICE_CUDA ? (size_t)2 << 20 /* the driver's pages */ : 4096;
}

bool device_reserve_scratch(Device *device, size_t bytes) {
    if (bytes <= device->scratch_bytes) return true;
    device_synchronize(device);
    device_free(device, device->scratch);
    device->scratch_bytes = 0;
    device->scratch = device_alloc(device, bytes);
    if (device->scratch) device->scratch_bytes = bytes;
    return device->scratch != NULL;
}

void device_upload(Device *device, void *to, const void *from, size_t bytes) {
    if (bytes) opened(device)->operations->upload(opened(device), to, from, bytes);
}

void device_download(Device *device, void *to, const void *from, size_t bytes) {
    if (bytes)
        opened(device)->operations->download(opened(device), to, from, bytes);
    else
        device_synchronize(device);
}

void device_copy(Device *device, void *to, const void *from, size_t bytes) {
    if (bytes) opened(device)->operations->copy(opened(device), to, from, bytes);
}

void device_zero(Device *device, void *memory, size_t bytes) {
    if (bytes) opened(device)->operations->zero(opened(device), memory, bytes);
}

void device_fetch(Device *public_device, const void *from, size_t bytes) {
    OpenDevice *device = opened(public_device);
    if (bytes > DEVICE_FETCH_BYTES || device->fetches - device->received >= DEVICE_FETCHES)
        error_fatal(__FILE__, __LINE__, "device_fetch of %zu bytes, %zu under way", bytes,
                    device->fetches - device->received);
    device->operations->fetch(device, device->fetches++ % DEVICE_FETCHES, from, bytes);
}

void device_receive(Device *public_device, void *to, size_t bytes) {
    OpenDevice *device = opened(public_device);
    if (device->received == device->fetches)
        error_fatal(__FILE__, __LINE__, "device_receive without a fetch under way");
    size_t slot = device->received++ % DEVICE_FETCHES;
    memcpy(to, device->operations->fetched(device, slot), bytes);
}

size_t device_steps_ahead(const Device *device) { return device->type == DEVICE_CUDA ? 4 : 1; }

void device_repeat(Device *device, DeviceGraph **graph, void (*work)(void *argument),
                   void *argument) {
    opened(device)->operations->repeat(opened(device), graph, work, argument);
}

void device_graph_free(Device *device, DeviceGraph *graph) {
    if (graph) opened(device)->operations->graph_free(graph);
}

void device_synchronize(Device *device) { opened(device)->operations->synchronize(opened(device)); }

void device_memory(Device *device, size_t *available, size_t *total) {
    opened(device)->operations->memory(opened(device), available, total);
}

size_t device_peak_allocated(const Device *device) { return ((const OpenDevice *)device)->peak; }
