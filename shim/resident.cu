// resident.cu - a decode step of one expert layer on the device: which routed experts are resident, who leaves, copy what is missing, ids to slots.
//
// Three kernels, no host. tsg_step stands in the way of the token and does only what the layer's first matmul waits for: every block computes the same lookup
// and the same victims from state that nobody changes meanwhile, then copies its share of the missing experts from mapped host memory; no block waits for
// another. tsg_rest copies what only the layer's last matmul reads (down), beside the first. tsg_commit runs beside both: it writes the new state and ranks the
// victims of the next step. Compiled to PTX by scripts/make-ptx; policy.h holds the score functions that slots.c uses too.
#include "victims.cuh"

// ---- copying ----

#define CHUNK_WORDS (4 * TSG_STEP_THREADS)  // words that a block copies at once: four reads in flight per thread

// Block `at` of every gridDim.x copies its share of `n` words.
template <typename T> static __device__ void copy_words(char * to, const char * from, uint64_t n, uint64_t at, uint64_t blocks) {
    const T * __restrict__ src = (const T *) from;
    T * __restrict__ dst       = (T *) to;
    for (uint64_t base = at * CHUNK_WORDS; base < n; base += blocks * CHUNK_WORDS) {
        const uint64_t i = base + threadIdx.x;
        if (base + CHUNK_WORDS <= n) {
            const T a = src[i], b = src[i + TSG_STEP_THREADS], c = src[i + 2 * TSG_STEP_THREADS], d = src[i + 3 * TSG_STEP_THREADS];
            dst[i] = a, dst[i + TSG_STEP_THREADS] = b, dst[i + 2 * TSG_STEP_THREADS] = c, dst[i + 3 * TSG_STEP_THREADS] = d;
        } else {
            for (uint64_t j = i; j < n; j += TSG_STEP_THREADS) {
                dst[j] = src[j];
            }
        }
    }
}

static __device__ void copy_bytes(char * to, const char * from, uint64_t bytes, uint64_t at, uint64_t blocks) {
    const uint64_t bits = (uint64_t) to | (uint64_t) from | bytes;
    if (bits % 16 == 0) {
        copy_words<uint4>(to, from, bytes / 16, at, blocks);
    } else if (bits % 4 == 0) {
        copy_words<uint32_t>(to, from, bytes / 4, at, blocks);
    } else {
        copy_words<uint8_t>(to, from, bytes, at, blocks);
    }
}

// Copies these banks of the missing experts. The pieces follow each other without a gap: where one ends, the next begins with the next block in turn.
static __device__ uint64_t gather(const tsg_dev_load * loads, int32_t n_loads, const tsg_dev_layer & layer, int32_t bank, int32_t end) {
    uint64_t bytes = 0;
    uint32_t turn  = 0;
    for (int32_t m = 0; m < n_loads; m++) {
        for (int32_t b = bank; b < end; b++) {
            const uint64_t size = layer.bank[b].bytes;
            copy_bytes(layer.bank[b].slots + loads[m].slot * size, layer.bank[b].host + loads[m].expert * size, size,
                       (blockIdx.x + gridDim.x - turn) % gridDim.x, gridDim.x);
            turn = (turn + (uint32_t) ((size / 16 + CHUNK_WORDS - 1) / CHUNK_WORDS)) % gridDim.x;
            bytes += size;
        }
    }
    return bytes;
}

static __device__ uint64_t nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// The same, no faster than a byte in `ps_per_byte`.
static __device__ void gather_at(uint64_t ps_per_byte, const tsg_dev_load * loads, int32_t n_loads, const tsg_dev_layer & layer, int32_t bank, int32_t end) {
    const uint64_t start = ps_per_byte ? nanoseconds() : 0;
    const uint64_t bytes = gather(loads, n_loads, layer, bank, end);
    while (ps_per_byte && nanoseconds() - start < bytes * ps_per_byte / 1000) {
    }
}

// ---- the new state ----

// SLRU: as protect() in slots.c. All threads of the block take part.
static __device__ void protect(const tsg_dev_pool & pool, int32_t id) {
    if (pool.use[id].segment) {
        return;  // the same for all threads
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        pool.use[id].segment = 1;
        pool.state->n_protected++;
    }
    __syncthreads();
    if ((int64_t) pool.state->n_protected * 100 <= (int64_t) pool.n_slots * TSG_PROTECTED_SHARE) {
        return;
    }
    victim oldest = { 0, 0, NONE, 0 };
    for (int32_t slot = threadIdx.x; slot < pool.n_slots; slot += blockDim.x) {
        const int32_t e = pool.expert_in[slot];
        if (e >= 0 && pool.use[e].segment) {
            const victim v = { 0, pool.use[e].last, slot, 1 };
            if (before(v, oldest)) {
                oldest = v;
            }
        }
    }
    oldest = block_min(oldest);
    if (threadIdx.x == 0) {
        pool.use[pool.expert_in[oldest.slot]].segment = 0;
        pool.state->n_protected--;
    }
    __syncthreads();
}

// ---- kernels ----

// The usual step, one token of up to 32 experts that are all resident, in one warp. Returns the number of missing experts; 0: the step is done.
static __device__ int32_t quick_step(const tsg_dev_pool & pool, const tsg_dev_layer & layer, int32_t expert, int32_t * slot_ids) {
    const int32_t  lane = threadIdx.x;
    const int32_t  slot = expert != NONE ? pool.slot_of[layer.first + expert] : 0;
    const uint32_t same = __match_any_sync(~0u, expert);  // by all lanes: a lane that does not take part would hang the others
    const bool     lead = expert != NONE && __ffs(same) - 1 == lane;
    const int32_t  n_miss = __popc(__ballot_sync(~0u, lead && slot == NONE));
    if (n_miss || blockIdx.x != 0) {
        return n_miss;
    }
    if (expert != NONE) {
        slot_ids[lane] = slot;
    }
    int32_t rank = 0;
    for (int32_t other = 0; other < 32; other++) {
        const int32_t theirs = __shfl_sync(~0u, lead ? expert : NONE, other);
        rank += theirs != NONE && theirs < expert;
    }
    if (lead) {
        pool.state->expert[rank] = expert;
        pool.state->slot[rank]   = slot;
    }
    const int32_t n_distinct = __popc(__ballot_sync(~0u, lead));
    if (lane == 0) {
        pool.state->n_distinct = n_distinct;
        pool.state->n_loads    = 0;
    }
    return 0;
}

// ids: the router's choice, [n_tokens] rows of n_used, `stride` apart; slot_ids: [n_tokens][n_used]. n_used * n_tokens <= TSG_STEP_THREADS. ps_per_byte points
// to the picoseconds that a byte must take, 0 = as fast as it goes.
extern "C" __global__ void __launch_bounds__(TSG_STEP_THREADS)
    tsg_step(const __grid_constant__ tsg_dev_pool pool, const __grid_constant__ tsg_dev_layer layer, const int32_t * ids, int32_t stride, int32_t n_used,
             int32_t n_tokens, int32_t * slot_ids, const uint64_t * ps_per_byte) {
    __shared__ step s;
    const int32_t i      = threadIdx.x;
    const int32_t n      = n_used * n_tokens;
    const int32_t expert = i < n ? ids[i / n_used * stride + i % n_used] : NONE;
    if (n <= 32) {
        if (i < 32) {
            const int32_t n_miss = quick_step(pool, layer, expert, slot_ids);
            if (i == 0) {
                s.n_miss = n_miss;
            }
        }
        __syncthreads();
        if (s.n_miss == 0) {
            return;
        }
        __syncthreads();
    }
    lookup(s, pool, layer, expert);
    if (s.n_miss) {
        choose(s, pool, layer, (enum tsg_policy) pool.state->policy, pool.state->clock);
    }
    if (i < s.n_miss) {
        s.load[i] = { s.expert[s.missing[i]], s.slot[s.missing[i]] };
    }
    if (blockIdx.x == 0) {
        if (expert != NONE) {
            slot_ids[i] = s.slot[rank_of(s, expert)];
        }
        if (i < s.n_distinct) {
            pool.state->expert[i] = s.expert[i];
            pool.state->slot[i]   = s.slot[i];
        }
        if (i < s.n_miss) {
            pool.state->load[i] = s.load[i];
        }
        if (i == 0) {
            pool.state->n_distinct = s.n_distinct;
            pool.state->n_loads    = s.n_miss;
        }
    }
    __syncthreads();
    gather_at(s.n_miss ? *ps_per_byte : 0, s.load, s.n_miss, layer, 0, layer.n_early);
}

// What the layer's last matmul reads, while the first computes. The same grid as tsg_step.
extern "C" __global__ void __launch_bounds__(TSG_STEP_THREADS)
    tsg_rest(const __grid_constant__ tsg_dev_pool pool, const __grid_constant__ tsg_dev_layer layer, const uint64_t * ps_per_byte) {
    const int32_t n_loads = pool.state->n_loads;
    if (n_loads) {
        gather_at(*ps_per_byte, pool.state->load, n_loads, layer, layer.n_early, layer.n_banks);
    }
}

// Lists the next victims in order. A thread keeps the best few of its slots at hand; only one whose best are all taken looks again.
static __device__ int32_t rank_victims(const tsg_dev_pool & pool, enum tsg_policy policy, uint64_t now) {
    const int32_t KEPT = 3;
    const victim  none = { 0, 0, NONE, 0 };
    victim        kept[KEPT] = { none, none, none };
    for (int32_t slot = threadIdx.x; slot < pool.n_slots; slot += blockDim.x) {
        victim v = candidate(pool, slot, policy, now);
#pragma unroll
        for (int32_t i = 0; i < KEPT; i++) {
            if (before(v, kept[i])) {
                const victim w = kept[i];
                kept[i]        = v;
                v              = w;
            }
        }
    }
    int32_t left = KEPT;
    for (int32_t found = 0; found < TSG_VICTIMS; found++) {
        const victim best = block_min(kept[0]);
        if (best.slot == NONE) {
            return found;
        }
        if (threadIdx.x == 0) {
            pool.state->victims[found] = best.slot;
        }
        if (kept[0].slot == best.slot) {
            kept[0] = kept[1];
            kept[1] = kept[2];
            kept[2] = none;
            if (--left == 0) {
                kept[0] = next_victim(NULL, pool, NULL, policy, now, best);
                left    = 1;  // from here on every loss means another look
            }
        }
    }
    return TSG_VICTIMS;
}

// The new state after a step, and the victims of the next. One block. `publish`: the last step of a graph shows the counters to the host.
extern "C" __global__ void __launch_bounds__(TSG_COMMIT_THREADS)
    tsg_commit(const __grid_constant__ tsg_dev_pool pool, int32_t first, uint64_t bytes_per_expert, int32_t publish) {
    __shared__ int32_t n_used, n_protected, n_miss, n_evicted;
    __shared__ bool    was_hit[TSG_STEP_THREADS];
    tsg_dev_state *       state      = pool.state;
    const int32_t         r          = threadIdx.x;
    const int32_t         n_distinct = state->n_distinct;
    const uint64_t        now        = state->clock + 1;
    const enum tsg_policy policy     = (enum tsg_policy) state->policy;
    if (r == 0) {
        n_used = n_protected = n_miss = n_evicted = 0;
    }
    __syncthreads();
    if (r < n_distinct) {
        const int32_t id   = first + state->expert[r];
        const int32_t slot = state->slot[r];
        const bool    hit  = pool.slot_of[id] != NONE;
        was_hit[r]         = hit;
        if (hit) {
            pool.hits[id]++;
        } else {
            const int32_t old = pool.expert_in[slot];
            if (old >= 0) {
                atomicSub(&n_protected, (int32_t) pool.use[old].segment);
                pool.use[old].segment = 0;
                pool.slot_of[old]     = NONE;
                atomicAdd(&n_evicted, 1);
            } else {
                atomicAdd(&n_used, 1);
            }
            atomicAdd(&n_miss, 1);
            pool.expert_in[slot] = id;
            pool.slot_of[id]     = slot;
            pool.use[id].loaded  = now;
            pool.use[id].last    = now;
            pool.misses[id]++;
        }
        tsg_use_count(&pool.use[id], now, pool.period);
    }
    __syncthreads();
    if (r == 0) {
        state->clock = now;
        state->n_used += n_used;
        state->n_protected += n_protected;
        tsg_dev_counts c = state->counts;
        c.lookups += n_distinct;
        c.hits += n_distinct - n_miss;
        c.misses += n_miss;
        c.evictions += n_evicted;
        c.bytes_link += n_miss * bytes_per_expert;
        state->counts = c;
        if (publish) {
            *pool.page = c;
        }
    }
    __syncthreads();
    for (int32_t i = 0; i < n_distinct && policy == TSG_POLICY_SLRU; i++) {
        if (was_hit[i]) {
            protect(pool, first + state->expert[i]);
        }
        __syncthreads();
    }
    const int32_t found = rank_victims(pool, policy, now);
    if (r == 0) {
        state->n_victims = found;
    }
}

// Prefill: copies the resident experts of a layer from their slots to their places in the stage. Grid: blocks per expert, experts.
extern "C" __global__ void __launch_bounds__(TSG_STEP_THREADS) tsg_stage(const __grid_constant__ tsg_dev_stage stage, const int32_t * slot_of) {
    const int32_t slot = slot_of[blockIdx.y];
    if (slot == NONE) {
        return;
    }
    for (int32_t b = 0; b < stage.n_banks; b++) {
        const uint64_t size = stage.bytes[b];
        copy_bytes(stage.stage[b] + blockIdx.y * size, stage.slots[b] + slot * size, size, blockIdx.x, gridDim.x);
    }
}

// Slows down copies by DMA: tsg_mark before them, tsg_delay after them on the same stream.
extern "C" __global__ void tsg_mark(uint64_t * mark) {
    *mark = nanoseconds();
}

extern "C" __global__ void tsg_delay(const uint64_t * mark, uint64_t ns) {
    while (nanoseconds() - *mark < ns) {
    }
}
