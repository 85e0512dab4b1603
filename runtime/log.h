/* What a run says of itself: a line for a person, a row of log.csv for a program. */
#ifndef RUNTIME_LOG_H
#define RUNTIME_LOG_H

#include <stdint.h>
#include <stdio.h>

#include "runtime/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Seconds on a clock that never goes back. */
double log_seconds(void);

/* Dense bf16 peak of this GPU in FLOP/s, from the maker's data sheet; 0 if it is not in the table. */
double log_peak_flops(const Device *device);

typedef struct {
    uint64_t step, steps; /* this update's number, from 1, and the last one's */
    double loss, norm, lr;
    double seconds;         /* of this step */
    double tokens;          /* of this step, all ranks */
    double flops_per_token; /* model FLOPs */
    double peak;            /* FLOP/s of all ranks' devices together; 0: unknown */
} LogStep;

/* "step   250/5000 | loss 2.0812 | norm 0.93 | lr 1.00e-03 | 4.1 ms | 3996k tok/s | mfu 31.2% | 0:19 left".
 * Time left is the steps' alone, at their mean so far. */
typedef struct {
    FILE *csv;
    double mean_seconds; /* running mean of a step */
} Log;

/* Opens directory/log.csv, keeping the rows of steps up to resume_step and dropping later ones (0:
 * start anew). False with error_message(). directory NULL: no file. A row that cannot be written
 * later gives one warning on stderr and ends the file, not the run. */
bool log_open(Log *log, const char *directory, uint64_t resume_step);
void log_step(Log *log, const LogStep *step, bool print);
/* A validation row and line. */
void log_validation(Log *log, uint64_t step, double loss, bool best);
void log_close(Log *log);

#ifdef __cplusplus
}
#endif
#endif
