/* The learning rate of each step: linear warm-up from 0, then constant, a line, or half a cosine down
 * to the minimum at the last step (Loshchilov, Hutter 2017). */
#ifndef GPT_SCHEDULE_H
#define GPT_SCHEDULE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT } ScheduleKind;

typedef struct {
    ScheduleKind kind;
    double lr, minimum;     /* the peak, and what the line and the cosine end at */
    uint64_t warmup, steps; /* updates */
} Schedule;

/* The rate of update number `step`, from 0. */
double schedule_lr(const Schedule *schedule, uint64_t step);

#ifdef __cplusplus
}
#endif
#endif
