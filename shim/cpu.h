// cpu.h - the CPU as the second computer of a model, and what the pager decided about misses.
#pragma once

#include "ggml-abi.h"
#include "tsg.h"

#include <stdatomic.h>
#include <threads.h>

#define TSG_CPU_LATE_MS  60000  // a layer that takes so long will not come: a disk under a cold mapping needs seconds
#define TSG_RATE_STEPS   64     // layers over which the CPU's speed is measured, if nobody gave it
#define TSG_MAX_PENDING  64     // copies on their way into slots

struct tsg_pool;

// The CPU and its one helper thread: it hands the work to ggml's own threads, so that the calling thread can drive the device meanwhile.
struct tsg_cpu {
    ggml_backend_t       backend;
    enum ggml_status  (* compute)(ggml_backend_t backend, struct ggml_cgraph * graph);  // tests put their own here
    int32_t              n_threads;
    int32_t              late_ms;
    bool                 spins;   // there is a core to spare for waiting
    thrd_t               thread;
    mtx_t                lock;
    cnd_t                changed;
    atomic_int           state;   // enum tsg_cpu_state
    atomic_bool          came_back;  // after it was lost
    struct ggml_cgraph * graph;
    enum ggml_status     status;
    uint64_t             took_ns;
};

enum tsg_cpu_state {
    TSG_CPU_IDLE,
    TSG_CPU_WANTED,  // a graph lies there
    TSG_CPU_DONE,
    TSG_CPU_LEAVES,
    TSG_CPU_LOST,    // it came too late, nobody waits any more
};

// A copy on its way into a slot, CUDA only. Until its event says that it is there, the expert is a miss.
struct tsg_pending {
    struct tsg_pool *    pool;
    int32_t              expert;  // id in the pool
    ggml_backend_event_t done;
};

// What a pager does with misses.
struct tsg_coexec {
    struct tsg_cpu * cpu;       // NULL: misses are fetched
    struct tsg_miss  miss;
    bool             cannot;    // a model whose chain cannot be cloned, or a device where it does not work; `why` says it
    uint64_t         credit;    // misses that count towards the next admission
    uint64_t         cpu_ns;    // measured over the first steps
    uint64_t         cpu_bytes;
    int32_t          cpu_steps;
    int32_t          n_pending;
    struct tsg_pending pending[TSG_MAX_PENDING];
    char             why[256];
    char             text[512];
};

struct tsg_cpu * tsg_cpu_new(ggml_backend_dev_t device, int32_t n_threads);  // NULL: no memory, or no thread
void             tsg_cpu_free(struct tsg_cpu * cpu);
bool             tsg_cpu_ready(const struct tsg_cpu * cpu);  // false: it was lost, and stays so
void             tsg_cpu_start(struct tsg_cpu * cpu, struct ggml_cgraph * graph);
bool             tsg_cpu_wait(struct tsg_cpu * cpu);                               // false: it failed, or is late
bool             tsg_cpu_is_lost(const struct tsg_cpu * cpu);  // it still computes, and what it works on must stay
uint64_t         tsg_nanoseconds(void);
