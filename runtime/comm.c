#include "runtime/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "runtime/error.h"

#ifdef TILEGPT_MPI
#include <mpi.h>
#define MPI_CHECK(call)                                                          \
    do {                                                                         \
        int status_ = (call);                                                    \
        if (status_ != MPI_SUCCESS)                                              \
            error_fatal(__FILE__, __LINE__, "%s: MPI error %d", #call, status_); \
    } while (0)
#endif
#ifdef TILEGPT_CUDA
#include <cuda_runtime_api.h>
#endif
#ifdef TILEGPT_NCCL
#include <nccl.h>
#define NCCL_CHECK(call)                                                                   \
    do {                                                                                   \
        ncclResult_t status_ = (call);                                                     \
        if (status_ != ncclSuccess)                                                        \
            error_fatal(__FILE__, __LINE__, "%s: %s", #call, ncclGetErrorString(status_)); \
    } while (0)
#endif

struct Comm {
    size_t rank, ranks, local_rank, local_ranks;
    double timeout;
    Device *device;
#ifdef TILEGPT_NCCL
    ncclComm_t nccl;
    cudaStream_t stream;       /* the sums' own */
    cudaEvent_t ready, summed; /* gradients computed; sums done */
#endif
};

/* Variables that Open MPI, PMIx and PMI launchers set for each process. */
static bool under_launcher(void) {
    const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (getenv(names[i])) return true;
    return false;
}

Comm *comm_open(int *argc, char ***argv) {
    Comm *comm = calloc(1, sizeof *comm);
    if (!comm) {
        error_set("out of host memory");
        return NULL;
    }
    comm->ranks = comm->local_ranks = 1;
    comm->timeout = 45;
    if (!under_launcher()) return comm;
#ifdef TILEGPT_MPI
    int rank, ranks, local_rank, local_ranks, provided;
    MPI_Comm local;
    MPI_CHECK(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided));
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    MPI_CHECK(
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local));
    MPI_CHECK(MPI_Comm_rank(local, &local_rank));
    MPI_CHECK(MPI_Comm_size(local, &local_ranks));
    MPI_CHECK(MPI_Comm_free(&local));
    comm->rank = (size_t)rank;
    comm->ranks = (size_t)ranks;
    comm->local_rank = (size_t)local_rank;
    comm->local_ranks = (size_t)local_ranks;
    return comm;
#else
    (void)argc, (void)argv;
    free(comm);
    error_set(
        "this was started by mpirun or srun, but the program was built without MPI; install "
        "Open MPI (make deps) and build again");
    return NULL;
#endif
}

void comm_close(Comm *comm) {
    if (!comm) return;
#ifdef TILEGPT_NCCL
    if (comm->nccl) {
        NCCL_CHECK(ncclCommDestroy(comm->nccl));
        cudaStreamDestroy(comm->stream);
        cudaEventDestroy(comm->ready);
        cudaEventDestroy(comm->summed);
    }
#endif
#ifdef TILEGPT_MPI
    int started = 0;
    MPI_CHECK(MPI_Initialized(&started));
    if (started) MPI_CHECK(MPI_Finalize());
#endif
    free(comm);
}

size_t comm_rank(const Comm *comm) { return comm->rank; }
size_t comm_ranks(const Comm *comm) { return comm->ranks; }
size_t comm_local_rank(const Comm *comm) { return comm->local_rank; }
size_t comm_local_ranks(const Comm *comm) { return comm->local_ranks; }
void comm_set_timeout(Comm *comm, double seconds) { comm->timeout = seconds; }

void comm_abort(Comm *comm, int status) {
    fflush(NULL);
#ifdef TILEGPT_MPI
    if (comm->ranks > 1) MPI_Abort(MPI_COMM_WORLD, status);
#endif
    (void)comm;
    _exit(status);
}

#ifdef TILEGPT_MPI
static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Waits for all requests; false if that takes longer than `seconds`. Sleeps once it has waited a
 * little, so that ranks sharing cores do not steal from the one they wait for. */
static bool wait_all(int count, MPI_Request *requests, double seconds) {
    double start = seconds_now();
    for (;;) {
        int done;
        MPI_CHECK(MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE));
        if (done) return true;
        double waited = seconds_now() - start;
        if (waited > seconds) return false;
        if (waited > 1e-3) usleep(100);
    }
}

enum { TAG_ALIVE = 71, TAG_SEEN };

/* Everyone reports to rank 0, which answers all when all have; whoever waits too long names the
 * silent rank and ends the run. */
static void roll_call(Comm *comm, double seconds) {
    char byte = 0;
    if (comm->rank == 0) {
        int others = (int)comm->ranks - 1;
        MPI_Request *reports = malloc((size_t)others * sizeof *reports);
        if (!reports) error_fatal(__FILE__, __LINE__, "out of host memory");
        for (int i = 0; i < others; i++)
            MPI_CHECK(MPI_Irecv(&byte, 0, MPI_CHAR, i + 1, TAG_ALIVE, MPI_COMM_WORLD, &reports[i]));
        if (!wait_all(others, reports, seconds)) {
            for (int i = 0; i < others; i++) {
                int done;
                MPI_CHECK(MPI_Test(&reports[i], &done, MPI_STATUS_IGNORE));
                if (!done)
                    fprintf(stderr, "rank %d has been silent for %.0f s; ending the run\n", i + 1,
                            seconds);
            }
            comm_abort(comm, 1);
        }
        for (int i = 0; i < others; i++)
            MPI_CHECK(MPI_Isend(&byte, 0, MPI_CHAR, i + 1, TAG_SEEN, MPI_COMM_WORLD, &reports[i]));
        MPI_CHECK(MPI_Waitall(others, reports, MPI_STATUSES_IGNORE));
        free(reports);
    } else {
        MPI_Request both[2];
        MPI_CHECK(MPI_Isend(&byte, 0, MPI_CHAR, 0, TAG_ALIVE, MPI_COMM_WORLD, &both[0]));
        MPI_CHECK(MPI_Irecv(&byte, 0, MPI_CHAR, 0, TAG_SEEN, MPI_COMM_WORLD, &both[1]));
        /* Longer than rank 0 waits, so that it is the one to name a silent third. */
        if (!wait_all(2, both, seconds + 5)) {
            fprintf(stderr, "rank 0 has been silent for %.0f s; ending the run\n", seconds + 5);
            comm_abort(comm, 1);
        }
    }
}

/* Waits for a collective; if it does not end in time, a short roll call finds out who is missing. */
static void finish(Comm *comm, MPI_Request *request) {
    if (wait_all(1, request, comm->timeout)) return;
    roll_call(comm, 5);
    fprintf(stderr, "rank %zu: a sum over the ranks has not ended in %.0f s, though all answer\n",
            comm->rank, comm->timeout);
    comm_abort(comm, 1);
}

static void sum_host(Comm *comm, void *values, size_t n, DataType type) {
    const size_t most = (size_t)1 << 28; /* counts are int */
    for (size_t i = 0; i < n; i += most) {
        MPI_Request request;
        int count = (int)(n - i < most ? n - i : most);
        MPI_CHECK(MPI_Iallreduce(MPI_IN_PLACE, (char *)values + i * type_bytes(type), count,
                                 type == TYPE_F64 ? MPI_DOUBLE : MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                                 &request));
        finish(comm, &request);
    }
}
#endif

void comm_heartbeat(Comm *comm) {
#ifdef TILEGPT_MPI
    if (comm->ranks > 1) roll_call(comm, comm->timeout);
#endif
    (void)comm;
}

bool comm_attach(Comm *comm, Device *device) {
    comm->device = device;
    if (comm->ranks == 1 || device->type == DEVICE_CPU) return true;
#ifdef TILEGPT_NCCL
    ncclUniqueId id;
    if (comm->rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    comm_broadcast(comm, &id, sizeof id);
    NCCL_CHECK(ncclCommInitRank(&comm->nccl, (int)comm->ranks, id, (int)comm->rank));
    if (cudaStreamCreateWithFlags(&comm->stream, cudaStreamNonBlocking) != cudaSuccess ||
        cudaEventCreateWithFlags(&comm->ready, cudaEventDisableTiming) != cudaSuccess ||
        cudaEventCreateWithFlags(&comm->summed, cudaEventDisableTiming) != cudaSuccess)
        error_fatal(__FILE__, __LINE__, "no CUDA stream for the sums over ranks");
    return true;
#else
    return error_set(
        "several GPUs need NCCL, which was not found when this was built; set NCCL_HOME "
        "and build again, or use --device=cpu");
#endif
}

void comm_sum(Comm *comm, void *values, size_t n, DataType type) {
    if (comm->ranks == 1) return;
#ifdef TILEGPT_NCCL
    if (comm->nccl) {
        cudaStream_t compute = (cudaStream_t)comm->device->stream;
        if (cudaEventRecord(comm->ready, compute) != cudaSuccess ||
            cudaStreamWaitEvent(comm->stream, comm->ready, 0) != cudaSuccess)
            error_fatal(__FILE__, __LINE__, "%s", cudaGetErrorString(cudaGetLastError()));
        NCCL_CHECK(ncclAllReduce(values, values, n, type == TYPE_F64 ? ncclDouble : ncclFloat,
                                 ncclSum, comm->nccl, comm->stream));
        return;
    }
#endif
#ifdef TILEGPT_MPI
    sum_host(comm, values, n, type);
#else
    (void)values, (void)n, (void)type;
#endif
}

void comm_wait(Comm *comm) {
#ifdef TILEGPT_NCCL
    if (comm->nccl &&
        (cudaEventRecord(comm->summed, comm->stream) != cudaSuccess ||
         cudaStreamWaitEvent((cudaStream_t)comm->device->stream, comm->summed, 0) != cudaSuccess))
        error_fatal(__FILE__, __LINE__, "%s", cudaGetErrorString(cudaGetLastError()));
#endif
    (void)comm;
}

double comm_sum_double(Comm *comm, double value) {
#ifdef TILEGPT_MPI
    if (comm->ranks > 1) sum_host(comm, &value, 1, TYPE_F64);
#endif
    (void)comm;
    return value;
}

void comm_broadcast(Comm *comm, void *bytes, size_t n) {
#ifdef TILEGPT_MPI
    if (comm->ranks > 1) {
        MPI_Request request;
        MPI_CHECK(MPI_Ibcast(bytes, (int)n, MPI_BYTE, 0, MPI_COMM_WORLD, &request));
        finish(comm, &request);
    }
#endif
    (void)comm, (void)bytes, (void)n;
}

void comm_barrier(Comm *comm) {
#ifdef TILEGPT_MPI
    if (comm->ranks > 1) {
        MPI_Request request;
        MPI_CHECK(MPI_Ibarrier(MPI_COMM_WORLD, &request));
        wait_all(1, &request, 1e30);
    }
#endif
    (void)comm;
}
