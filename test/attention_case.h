/* One attention problem, run by any family on any device and type, and compared.
 *
 * Inputs are multiples of 1/64 in [-2, 2), exact in bf16, so that all types compute the same problem.
 * Every run fills outputs, the gaps between them and the workspace with NaN first: what is not
 * written fails its comparison, what is written outside fails the check of the gaps. */
#ifndef TEST_ATTENTION_CASE_H
#define TEST_ATTENTION_CASE_H

#include <stdbool.h>

#include "attention/attention.h"
#include "test/devices.h"

enum { Q, K, V, DOUT, INPUTS };
enum { O, LSE, DQ, DK, DV, OUTPUTS };

/* EXPANDED: as SEPARATE, but all heads of all sequences read the first one's K and V, by strides of
 * 0. new_run makes them equal; naive in double, the reference, reads each where it is, and for the
 * others all but the first are NaN. */
typedef enum { PACKED, SEPARATE, HEADS_FIRST, GAPS, EXPANDED } Layout;

typedef struct {
    size_t B, NH, NKV, TQ, TK, HS;
    AttentionMask mask;
    float dropout;
    Layout layout;
} Case;

/* What all families are run on: every head size class, lengths around the tiles, fewer and more
 * keys than queries, shared keys, dropout, every layout. */
extern const Case cases[];
extern const size_t case_count;

/* The tensors of a case in double, (B,T,NH or NKV,HS) contiguous; lse (B,NH,TQ). */
typedef struct {
    Attention problem;
    Layout layout;
    size_t in_size[INPUTS], out_size[OUTPUTS];
    double *in[INPUTS], *out[OUTPUTS];
} Run;

double *doubles(size_t n); /* zeros; the caller frees them */

/* Whether each of n bytes is `value`. */
bool all_bytes(const void *memory, int value, size_t n);

/* The problem on the CPU in double by the naive family, with its inputs; not run yet. */
Run new_run(const Case *c);
void free_run(Run *r);

typedef enum { FORWARD, FORWARD_AND_BACKWARD } Passes;

/* Fills r->out from r->in with the problem's device, type and family. */
void run(Run *r, Passes passes);

/* The same inputs as r, run otherwise. */
Run run_like(const Run *r, DeviceType device, DataType type, AttentionFamily family);

/* The same, so many times more, each with the same bits. */
Run run_repeatedly(const Run *r, DeviceType device, DataType type, AttentionFamily family,
                   int repeats);

/* Scores of some thousands: exp must never see one that is not reduced by the maximum. */
Run large_scores(void);

/* --- comparing --- */

/* ‖x − ref‖ / ‖ref‖, with ‖ref‖ at least that of elements of size 1e-3: some results are 0 but for
 * rounding, such as dq when there is one key, and have no relative error. -inf must meet -inf. */
double error_of(const Run *x, const Run *reference, int output);

/* These fail the test, with a line that names the problem. */
void assert_error(const Run *x, int output, double e, double tolerance);
void assert_close(const Run *x, const Run *reference, double tolerance);
void assert_same_bits(const Run *x, const Run *y);

/* The first `rows` queries see no key, and they alone. */
void assert_no_keys(const Run *r, size_t rows);

/* Between two ways to compute in double: 1e-16 for each rounding, some hundreds in a row. */
static const double double_tolerance = 1e-12;
/* fp32 against double: 6e-8 for each rounding, and differences dP - D lose a digit. */
static const double float_tolerance = 1e-5;
/* Scores of 1e4 have an error of 1e-3 in fp32, which is the relative error of exp; where two keys
 * are close it moves P by as much. */
static const double large_score_tolerance = 1e-2;

#endif
