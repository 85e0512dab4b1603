/* The directory of one training run: its exact flags, its log and its checkpoints. */
#ifndef RUNTIME_RUN_H
#define RUNTIME_RUN_H

#include "runtime/files.h"
#include "runtime/flags.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char directory[FILE_PATH_BYTES];
    char flags[FILE_PATH_BYTES];     /* flags.txt */
    char last[FILE_PATH_BYTES];      /* checkpoint to go on from */
    char best[FILE_PATH_BYTES];      /* model of the best validation */
    char tokenizer[FILE_PATH_BYTES]; /* tokenizer.json */
} Run;

/* Names the paths of a run without touching the disk. */
bool run_name(Run *run, const char *directory);
/* Until this process ends, no other trains in the run's directory. False with error_message() if one
 * does. */
bool run_lock(const Run *run);
/* Makes and locks the directory `wanted`, or, if that is "", runs/NAME, runs/NAME-2, … the first that
 * does not exist. False with error_message() if `wanted` already holds a run, or something by the
 * names of what a run writes. */
bool run_create(Run *run, const char *wanted, const char *name);
bool run_write_flags(const Run *run, const Flag *flags);
/* Sets the recorded flags, except those given now. False with error_message() if one is not valid or
 * lacks its line. */
bool run_read_flags(const Run *run, Flag *flags);

#ifdef __cplusplus
}
#endif
#endif
