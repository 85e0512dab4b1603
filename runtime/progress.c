#include "runtime/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/log.h"

static const double interval = 0.2; /* seconds between two writings of the line */

Progress progress_begin(const char *verb, const char *unit, uint64_t first, uint64_t total) {
    return (Progress){.verb = verb,
                      .unit = unit,
                      .first = first,
                      .total = total,
                      .started = log_seconds(),
                      .visible = isatty(STDERR_FILENO)};
}

/* "1.20 GB", "12345": bytes have a prefix, other things are counted. */
static const char *format(char text[32], double amount, const char *unit) {
    int prefix = 0;
    if (unit[0])
        for (; amount >= 1000 && prefix < 4; prefix++) amount /= 1000;
    snprintf(text, 32, "%.*f%s%.1s%s", prefix ? 2 : 0, amount, unit[0] ? " " : "",
             &"\0kMGT"[prefix], unit);
    return text;
}

void progress_show(Progress *progress, uint64_t done) {
    if (!progress->visible) return;
    double now = log_seconds(), seconds = now - progress->started;
    if (now - progress->shown < interval) return;
    progress->shown = now;
    char amount[32], speed[32];
    double per_second = seconds > 0 ? (double)(done - progress->first) / seconds : 0;
    fprintf(stderr, "\r%s ", progress->verb);
    if (progress->total)
        fprintf(stderr, "%3.0f%% | ", 100.0 * (double)done / (double)progress->total);
    fprintf(stderr, "%s | %s/s", format(amount, (double)done, progress->unit),
            format(speed, per_second, progress->unit));
    if (progress->total > done && per_second > 0) {
        unsigned long left = (unsigned long)((double)(progress->total - done) / per_second);
        fprintf(stderr, " | %lu:%02lu left", left / 60, left % 60);
    }
    fputs("\033[K", stderr);
    fflush(stderr);
}

void progress_end(Progress *progress) {
    if (progress->visible && progress->shown > 0) fputs("\r\033[K", stderr);
    progress->visible = false;
}
