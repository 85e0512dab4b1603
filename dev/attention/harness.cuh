/* What the ladder's main program is made of, besides the rungs. */
#ifndef DEV_ATTENTION_HARNESS_CUH
#define DEV_ATTENTION_HARNESS_CUH

#include <algorithm>

#include "dev/attention/ladder.cuh"

/* --- reference.cu, on the default stream --- */

/* n normal numbers, rounded to bf16; a pure function of the key. */
void fill_normal(bf16 *x, size_t n, uint64_t key);

/* The answers in float64, in device memory: shapes as in Problem. */
struct Reference {
    double *o, *lse, *dq, *dk, *dv; /* the last three are NULL for a forward */
};

/* From Q, K, V, and dO for a backward, by the definition, one head after another. Also leaves O and
 * LSE, rounded, in p.o and p.lse, where a backward finds them. */
void reference_compute(const Problem &p, const Reference &reference);

/* How far x is from y. */
struct Error {
    double all; /* ‖x - y‖ / ‖y‖ */
    double row; /* the largest of a row, ‖x - y‖ / (‖y‖ + the root of the mean ‖y‖²): a single wrong
                 * row among many counts, also one whose true value is small */
};

/* Both are NaN if there is one in x. */
Error reference_error(const bf16 *x, const double *y, size_t rows, int columns);
Error reference_error(const float *x, const double *y, size_t rows, int columns);

/* --- ceiling.cu --- */

/* TFLOP/s of a bf16 matrix product of 8192³ by cuBLASLt, now, in as long groups as the rungs. */
double measure_ceiling(cudaStream_t stream);

/* --- timing --- */

/* Median seconds of launch(0), launch(1), …, by events around groups of launches that are long
 * enough that starting does not show. Warms up first; repeats less where one launch takes long. */
template <class Launch>
double median_seconds(cudaStream_t stream, int sets, Launch launch) {
    enum { REPEATS = 11 };
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    auto seconds_of = [&](int launches) {
        CUDA_CHECK(cudaEventRecord(begin, stream));
        for (int i = 0; i < launches; i++)
            launch(i % sets);
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        float milliseconds;
        CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
        return milliseconds / 1e3 / launches;
    };
    double once = seconds_of(sets), seconds[REPEATS], total = 0;
    if (once < 0.1) once = seconds_of(2 * sets); /* the first launch also loads the kernel */
    const int launches = std::max(sets, (int)(0.03 / once));
    int n = 0;
    while (n < REPEATS && (n < 3 || total < 3)) {
        seconds[n] = seconds_of(launches);
        total += seconds[n++] * launches;
    }
    std::sort(seconds, seconds + n);
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return (seconds[(n - 1) / 2] + seconds[n / 2]) / 2;
}

#endif
