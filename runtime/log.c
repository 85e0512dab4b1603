#include "runtime/log.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

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

static const char header[] = "step,split,loss,norm,lr,ms,tokens_per_second\n";

/* The part of an earlier log that ends with this step. */
static bool keep_rows(const char *path, uint64_t step) {
    char *text = file_read(path, (size_t)1 << 30, NULL);
    if (!text) return false;
    char *end = text;
    for (char *line = text; *line; line = end) {
        char *newline = strchr(line, '\n');
        if (!newline || (line != text && strtoull(line, NULL, 10) > step)) break;
        end = newline + 1;
    }
    bool good = file_write(path, text, (size_t)(end - text));
    free(text);
    return good;
}

bool log_open(Log *log, const char *directory, uint64_t resume_step) {
    memset(log, 0, sizeof *log);
    if (!directory) return true;
    char path[FILE_PATH_BYTES];
    if (!file_join(path, directory, "log.csv")) return false;
    bool keep = resume_step > 0 && file_exists(path);
    if (keep && !keep_rows(path, resume_step)) return false;
    log->csv = fopen(path, keep ? "a" : "w");
    if (!log->csv) return error_set("%s cannot be written", path);
    if (!keep) fputs(header, log->csv);
    fflush(log->csv);
    return true;
}

void log_step(Log *log, const LogStep *s, bool print) {
    double speed = s->tokens / s->seconds;
    /* The first step pays for plans and page faults; a slowly moving mean forgets it. */
    log->mean_seconds += (log->mean_seconds == 0 ? 1 : 0.05) * (s->seconds - log->mean_seconds);
    if (log->csv) {
        fprintf(log->csv, "%llu,train,%.9g,%.9g,%.9g,%.3f,%.0f\n", (unsigned long long)s->step,
                s->loss, s->norm, s->lr, 1e3 * s->seconds, speed);
        fflush(log->csv);
    }
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
    if (log->csv) {
        fprintf(log->csv, "%llu,validation,%.9g,,,,\n", (unsigned long long)step, loss);
        fflush(log->csv);
    }
    printf("step %5llu | validation loss %.4f%s\n", (unsigned long long)step, loss,
           best ? " (best)" : "");
    fflush(stdout);
}

void log_close(Log *log) {
    if (log->csv) fclose(log->csv);
    log->csv = NULL;
}
