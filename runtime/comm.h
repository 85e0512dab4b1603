/* The ranks of a run: MPI between processes, NCCL between their GPUs.
 *
 * MPI is started only under a launcher (mpirun, srun), so a single process needs no MPI daemon. On
 * CUDA the sums run on a stream of their own: comm_sum starts after the work given to the device so
 * far, and work given after comm_wait sees its result; between the two the device computes on. */
#ifndef RUNTIME_COMM_H
#define RUNTIME_COMM_H

#include "runtime/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Comm Comm;

/* Joins the job; alone it is rank 0 of 1. NULL with error_message() if this program was started by a
 * launcher but built without MPI. */
Comm *comm_open(int *argc, char ***argv);
void comm_close(Comm *comm);

size_t comm_rank(const Comm *comm);
size_t comm_ranks(const Comm *comm);
/* The rank among those on this node: the GPU that this rank should open. */
size_t comm_local_rank(const Comm *comm);
size_t comm_local_ranks(const Comm *comm);

/* Readies sums over this device's memory; collective. False with error_message() if the device is a
 * GPU and the program was built without NCCL. */
bool comm_attach(Comm *comm, Device *device);

/* values[0..n) (device memory, float or double) = their sum over all ranks; see the top. */
void comm_sum(Comm *comm, void *values, size_t n, DataType type);
void comm_wait(Comm *comm);

/* Host memory, blocking: the sum of one double; rank 0's bytes to everyone. */
double comm_sum_double(Comm *comm, double value);
void comm_broadcast(Comm *comm, void *bytes, size_t n);
/* Waits for every rank, however long it takes: where one of them does something slow, as saving. */
void comm_barrier(Comm *comm);

/* The longest that a rank waits for another in comm_sum, comm_sum_double, comm_broadcast and
 * comm_heartbeat (45 s unless set). Past it the run ends: the silent rank's number is printed and
 * every rank is aborted with status 1. */
void comm_set_timeout(Comm *comm, double seconds);
/* Every rank calls it once a step, when its work is queued and before it waits for its device: sums
 * on a GPU cannot watch the other ranks, so this does. */
void comm_heartbeat(Comm *comm);

/* Ends every rank with this status, now. */
void comm_abort(Comm *comm, int status) __attribute__((noreturn));

#ifdef __cplusplus
}
#endif
#endif
