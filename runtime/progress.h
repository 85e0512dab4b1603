/* A line on stderr that tells how far a long work is; nothing if stderr is no terminal. */
#ifndef RUNTIME_PROGRESS_H
#define RUNTIME_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *verb;      /* "encoding" */
    const char *unit;      /* "B": shown as bytes; "": a plain number */
    uint64_t first, total; /* done before it began; 0: how much there is is not known */
    double started, shown; /* seconds */
    bool visible;
} Progress;

/* `first` of the work was done by an earlier run. */
Progress progress_begin(const char *verb, const char *unit, uint64_t first, uint64_t total);
/* To be called as often as one likes: "encoding  42% | 1.20 GB | 35.1 MB/s | 0:48 left". */
void progress_show(Progress *progress, uint64_t done);
/* Removes the line. */
void progress_end(Progress *progress);

#ifdef __cplusplus
}
#endif
#endif
