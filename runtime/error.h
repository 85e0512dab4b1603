/* Two kinds of failure.
 *
 * What a user can cause (a file that is not a checkpoint, a shape that does not fit, no memory) is
 * reported: the function that notices it calls error_set with a sentence that says what was found,
 * what was expected and what to do, and returns false or NULL; its caller passes that on. The
 * program prints the sentence and exits with status 2.
 *
 * What only a broken program or machine can cause (a CUDA, MPI or NCCL call that fails) is fatal:
 * the call, its error, file and line are printed and the process exits with status 1. */
#ifndef RUNTIME_ERROR_H
#define RUNTIME_ERROR_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Records the sentence (no final newline) for this thread, replacing what was there; returns false
 * so that `return error_set(…)` reads well. The arguments may include error_message() itself. */
bool error_set(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The last sentence recorded by this thread, "" if none. Valid until the next error_set. */
const char *error_message(void);

/* Prints "file:line: message" to stderr and exits with status 1. */
void error_fatal(const char *file, int line, const char *format, ...)
    __attribute__((noreturn, format(printf, 3, 4)));

#ifdef __cplusplus
}
#endif

/* Also for C sources of a build with CUDA, which include cuda_runtime.h themselves. */
#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif
#if defined(__CUDACC__) || defined(TILEGPT_CUDA)
#define CUDA_CHECK(call)                                                                     \
    do {                                                                                     \
        cudaError_t status_ = (call);                                                        \
        if (status_ != cudaSuccess)                                                          \
            error_fatal(__FILE__, __LINE__, "%s: %s (%s)", #call, cudaGetErrorName(status_), \
                        cudaGetErrorString(status_));                                        \
    } while (0)
#endif

#endif
