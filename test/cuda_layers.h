/* A layer on CUDA, in fp32 or bf16, against its CPU twin in double on the same inputs.
 *
 * A case makes its tensors once for each of three sides: the CPU in double, CUDA, and CUDA again.
 * The layer is called for all sides; then checks hold CUDA against the CPU, and both CUDA runs
 * must have written the same bits and nothing outside their tensors. Inputs are rounded to the type
 * under test first, so that both devices start from equal numbers. Outputs start as NaN, so what a
 * kernel leaves unwritten fails; accumulators start at numbers, so `=` for `+=` fails. */
#ifndef TEST_CUDA_LAYERS_H
#define TEST_CUDA_LAYERS_H

#include "layers/layers.h"
#include "test/part.h"

typedef enum { REFERENCE, FIRST, AGAIN, SIDES } Side;

#define FOR_SIDES(s) for (Side s = REFERENCE; s < SIDES; s++)
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

enum { MAX_N = 4096, MAX_C = 5000 };

/* The test that runs. */
typedef struct {
    Device *devices[SIDES];
    const Layers *layers[SIDES];
    DataType type; /* under test */
    size_t shift;  /* elements from a 16-byte boundary at which real tensors start */
    uint64_t key;  /* of the next random tensor */
} LayerTest;

extern LayerTest t;

/* ---- tests: start(state) first, finish() last ---- */

/* cmocka's set-up and tear-down of a group: the devices. */
int open_sides(void **state);
int close_sides(void **state);

/* A test's state is the type that it is run in. */
extern DataType fp32, bf16;
#define IN_BOTH_TYPES(test)                            \
    {#test " on CUDA, fp32", test, NULL, NULL, &fp32}, \
        {#test " on CUDA, bf16", test, NULL, NULL, &bf16}

/* Skips the test where there is no GPU. */
void start(void **state);
/* Prints the largest error of each quantity over all cases, and fails if one is too large. */
void finish(void);

/* ---- cases: begin_case() first, end_case() last ---- */

/* The layer and its shape, for messages. */
void begin_case(const char *layer, const char *format, ...);
/* Fails unless both runs have equal bits and nothing was written outside; frees the tensors. */
void end_case(void);

typedef struct Tensor Tensor;

/* A tensor of NaN, and one of these values. */
Tensor *output(const char *name, size_t n, DataType type);
Tensor *integers(const char *name, size_t n, const int32_t *values);
/* These values, rounded to the tensor's type on every side. */
Tensor *given(const char *name, size_t n, DataType type, float *values);
/* Random ones, of this mean and deviation. */
Tensor *normal(const char *name, size_t n, DataType type, float mean, float deviation);

/* The next random number, less than `below`. */
uint64_t random_below(uint64_t below);

/* The tensor's address for a layer call; NULL for no tensor. */
void *at(const Tensor *tensor, Side side);
/* The values of one side, to be freed. */
double *download(const Tensor *tensor, Side side);
/* Makes what CUDA computed the reference for what is computed from it. */
void adopt(const Tensor *tensor);

/* ---- comparison ---- */

/* ‖CUDA - CPU‖ / ‖CPU‖ <= tolerance. */
void check_norm(const Tensor *tensor, double tolerance);
/* |CUDA - CPU| <= relative |CPU| + absolute for each element; recorded as a fraction of that. With
 * absolute = 0 a reference of 0 must be met exactly. */
void check_each(const Tensor *tensor, double relative, double absolute);

/* Tolerances. Float arithmetic on some thousand terms loses up to 1e-5 of the result, mostly less.
 * A tensor of bf16 adds one rounding, at most 2^-8 of each element and so of the norm. */
static const double ARITHMETIC = 1e-5;
double rounded(void);
/* Tensor cores truncate as they add, which costs more than rounding does. */
double matmul(void);
double matmul_rounded(void);
/* GELU or its derivative may be applied to a product that was rounded to bf16 before. */
double matmul_rounded_twice(void);

extern const size_t rows[5], widths[7];
extern const Dropout no_dropout, dropout_tenth;

#endif
