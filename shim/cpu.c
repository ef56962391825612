// cpu.c - the CPU beside the device: one helper thread that runs graphs on ggml's CPU backend.
#define _GNU_SOURCE  // sched_getaffinity

#include "coexec.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

// Waking a sleeping thread takes some 20 to 50 microseconds, and would twice a layer: who waits looks for a while first.
#define HELPER_SPIN_NS 200000   // about what a device needs between two layers
#define CALLER_SPIN_NS 5000000  // about what a CPU needs for the misses of one

uint64_t tsg_nanoseconds(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (uint64_t) t.tv_sec * 1000000000u + (uint64_t) t.tv_nsec;
}

// Looks for a while whether the state has left `from`.
static bool spin(struct tsg_cpu * cpu, int from, uint64_t ns) {
    const uint64_t start = cpu->spins ? tsg_nanoseconds() : 0;
    do {
        if (atomic_load(&cpu->state) != from) {
            return true;
        }
        thrd_yield();
    } while (cpu->spins && tsg_nanoseconds() - start < ns);
    return false;
}

// Who is lost stays so until it leaves. Returns what the state became, which is not what it is by then.
static int set_state(struct tsg_cpu * cpu, int state) {
    mtx_lock(&cpu->lock);
    if (atomic_load(&cpu->state) == TSG_CPU_LOST && state != TSG_CPU_LEAVES) {
        state = TSG_CPU_LOST;
    }
    atomic_store(&cpu->state, state);
    cnd_broadcast(&cpu->changed);
    mtx_unlock(&cpu->lock);
    return state;
}

// The next thing to do; sleeps until there is one.
static int next_state(struct tsg_cpu * cpu, int from) {
    if (!spin(cpu, from, HELPER_SPIN_NS)) {
        mtx_lock(&cpu->lock);
        while (atomic_load(&cpu->state) == from) {
            cnd_wait(&cpu->changed, &cpu->lock);
        }
        mtx_unlock(&cpu->lock);
    }
    return atomic_load(&cpu->state);
}

static void free_memory(struct tsg_cpu * cpu) {
    ggml_backend_free(cpu->backend);
    cnd_destroy(&cpu->changed);
    mtx_destroy(&cpu->lock);
    free(cpu);
}

static int helper(void * data) {
    struct tsg_cpu * cpu   = data;
    int              state = TSG_CPU_IDLE;
    for (;;) {
        state = next_state(cpu, state);
        if (state == TSG_CPU_LEAVES) {
            return 0;
        }
        if (state == TSG_CPU_WANTED) {
            const uint64_t start = tsg_nanoseconds();
            cpu->status  = cpu->compute(cpu->backend, cpu->graph);
            cpu->took_ns = tsg_nanoseconds() - start;
            state        = set_state(cpu, TSG_CPU_DONE);
        }
        if (state == TSG_CPU_LOST) {
            atomic_store(&cpu->came_back, true);
            return 0;
        }
    }
}

bool tsg_cpu_is_lost(const struct tsg_cpu * cpu) {
    return cpu && atomic_load(&cpu->state) == TSG_CPU_LOST && !atomic_load(&cpu->came_back);
}

static int usable_cores(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

struct tsg_cpu * tsg_cpu_new(ggml_backend_dev_t device, int32_t n_threads) {
    struct tsg_cpu * cpu = calloc(1, sizeof(struct tsg_cpu));
    if (!cpu) {
        return NULL;
    }
    ggml_backend_reg_t           reg = ggml_backend_dev_backend_reg(device);
    ggml_backend_set_n_threads_t set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    cpu->backend   = ggml_backend_dev_init(device, NULL);
    cpu->compute   = ggml_backend_graph_compute;
    cpu->n_threads = n_threads;
    cpu->late_ms   = TSG_CPU_LATE_MS;
    cpu->spins     = usable_cores() > n_threads;
    atomic_init(&cpu->state, TSG_CPU_IDLE);
    mtx_init(&cpu->lock, mtx_plain);
    cnd_init(&cpu->changed);
    if (!cpu->backend || !set || thrd_create(&cpu->thread, helper, cpu) != thrd_success) {
        free_memory(cpu);
        return NULL;
    }
    set(cpu->backend, n_threads);
    return cpu;
}

void tsg_cpu_free(struct tsg_cpu * cpu) {
    if (!cpu) {
        return;
    }
    set_state(cpu, TSG_CPU_LEAVES);
    thrd_join(cpu->thread, NULL);
    free_memory(cpu);
}

void tsg_cpu_start(struct tsg_cpu * cpu, struct ggml_cgraph * graph) {
    cpu->graph = graph;
    set_state(cpu, TSG_CPU_WANTED);
}

bool tsg_cpu_ready(const struct tsg_cpu * cpu) {
    const bool ready = atomic_load(&cpu->state) != TSG_CPU_LOST;
    if (!ready) {
        tsg_fail(TSG_E_STATE, "the CPU did not finish the misses of an earlier layer: load the model again, or use --miss fetch");
    }
    return ready;
}

bool tsg_cpu_wait(struct tsg_cpu * cpu) {
    struct timespec until;
    timespec_get(&until, TIME_UTC);
    until.tv_sec  += cpu->late_ms / 1000;
    until.tv_nsec += cpu->late_ms % 1000 * 1000000L;
    until.tv_sec  += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    spin(cpu, TSG_CPU_WANTED, CALLER_SPIN_NS);
    mtx_lock(&cpu->lock);
    int result = thrd_success;
    while (atomic_load(&cpu->state) == TSG_CPU_WANTED && result == thrd_success) {
        result = cnd_timedwait(&cpu->changed, &cpu->lock, &until);
    }
    const bool late = atomic_load(&cpu->state) == TSG_CPU_WANTED;
    atomic_store(&cpu->state, late ? TSG_CPU_LOST : TSG_CPU_IDLE);
    mtx_unlock(&cpu->lock);
    if (late) {
        tsg_fail(TSG_E_STATE, "the CPU did not finish the misses of a layer within %d ms: use --miss fetch", cpu->late_ms);
    } else if (cpu->status != GGML_STATUS_SUCCESS) {
        tsg_fail(TSG_E_STATE, "the CPU could not compute the misses of a layer (%s): use --miss fetch", ggml_status_to_string(cpu->status));
    }
    return !late && cpu->status == GGML_STATUS_SUCCESS;
}
