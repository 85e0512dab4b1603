#include "runtime/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/error.h"
#include "runtime/files.h"

double log_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double log_peak_flops(const Device *device) {
    /* The first entry whose name occurs in the device's. */
    static const struct {
        const char *name;
        double teraflops;
    } peaks[] = {
        {"B200", 2250},     {"GH200", 989},    {"H200", 989},    {"H100 PCIe", 756},
        {"H100 NVL", 835},  {"H100", 989},     {"H800", 989},    {"A100", 312},
        {"A800", 312},      {"L40S", 362},     {"L40", 181},     {"L4", 121},
        {"A40", 150},       {"A30", 165},      {"A10G", 70},     {"A10", 125},
        {"RTX A6000", 155}, {"RTX 4090", 165}, {"RTX 4080", 97}, {"RTX 3090", 71},
        {"RTX 3080", 60},
    };
    if (device->type != DEVICE_CUDA) return 0;
    for (size_t i = 0; i < sizeof peaks / sizeof peaks[0]; i++)
        if (strstr(device->name, peaks[i].name)) return peaks[i].teraflops * 1e12;
    return 0;
}

#define HEADER "step,split,loss,norm,lr,ms,tokens_per_second\n"

/* Cuts an earlier log after the rows of this step. What stays is not written again, so no failure
 * can lose it. */
static bool keep_rows(const char *path, uint64_t step) {
    size_t bytes;
    char *text = file_read(path, (size_t)1 << 30, &bytes);
    if (!text) return false;
    char *end = text;
    for (char *line = text; line < text + bytes; line = end) {
        char *newline = memchr(line, '\n', (size_t)(text + bytes - line));
        if (!newline || (line != text && strtoull(line, NULL, 10) > step)) break;
        end = newline + 1;
    }
    bool good =
        truncate(path, end - text) == 0 || error_set("%s cannot be cut after step %llu: %s", path,
                                                     (unsigned long long)step, strerror(errno));
    free(text);
    return good;
}

/* A row that cannot be written ends the log, not the training. */
__attribute__((format(printf, 2, 3))) static void write_row(Log *log, const char *format, ...) {
    if (!log->csv) return;
    va_list arguments;
    va_start(arguments, format);
    bool good = vfprintf(log->csv, format, arguments) >= 0 && fflush(log->csv) == 0;
    va_end(arguments);
    if (good) return;
    fprintf(stderr, "log.csv cannot be written: %s; training goes on without it\n",
            strerror(errno));
    log_close(log);
}

bool log_open(Log *log, const char *directory, uint64_t resume_step) {
    memset(log, 0, sizeof *log);
    if (!directory) return true;
    char path[FILE_PATH_BYTES];
    if (!file_join(path, directory, "log.csv")) return false;
    bool keep = resume_step > 0 && file_exists(path);
    if (keep && !keep_rows(path, resume_step)) return false;
    log->csv = fopen(path, keep ? "a" : "w");
    if (!log->csv) return error_set("%s cannot be written: %s", path, strerror(errno));
    if (!keep) write_row(log, HEADER);
    return true;
}

void log_step(Log *log, const LogStep *s, bool print) {
    double speed = s->tokens / s->seconds;
    /* The first step pays for plans and page faults; a slowly moving mean forgets it. */
    log->mean_seconds += (log->mean_seconds == 0 ? 1 : 0.05) * (s->seconds - log->mean_seconds);
    write_row(log, "%llu,train,%.9g,%.9g,%.9g,%.3f,%.0f\n", (unsigned long long)s->step, s->loss,
              s->norm, s->lr, 1e3 * s->seconds, speed);
    if (!print) return;
    char mfu[16] = "unknown";
    if (s->peak > 0)
        snprintf(mfu, sizeof mfu, "%.1f%%", 100 * s->flops_per_token * speed / s->peak);
    unsigned long long left =
        (unsigned long long)(log->mean_seconds * (double)(s->steps - s->step));
    printf(
        "step %5llu/%llu | loss %.4f | norm %.3f | lr %.2e | %.1f ms | %.0f tok/s | mfu %s | "
        "%llu:%02llu left\n",
        (unsigned long long)s->step, (unsigned long long)s->steps, s->loss, s->norm, s->lr,
        1e3 * s->seconds, speed, mfu, left / 60, left % 60);
    fflush(stdout);
}

void log_validation(Log *log, uint64_t step, double loss, bool best) {
    write_row(log, "%llu,validation,%.9g,,,,\n", (unsigned long long)step, loss);
    printf("step %5llu | validation loss %.4f%s\n", (unsigned long long)step, loss,
           best ? " (best)" : "");
    fflush(stdout);
}

void log_close(Log *log) {
    if (log->csv) fclose(log->csv);
    log->csv = NULL;
}
