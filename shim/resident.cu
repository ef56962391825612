// resident.cu - a decode step of one expert layer on the device: which routed experts are resident, who leaves, copy what is missing, ids to slots.
//
// Two kernels, no host. tsg_step stands in the way of the token and does only what the layer's matmuls wait for: every block computes the same lookup and the
// same victims from state that nobody changes meanwhile, then copies its share of the missing experts from mapped host memory; no block waits for another.
// tsg_commit runs beside the matmuls: it writes the new state and ranks the victims of the next step. Compiled to PTX by scripts/make-ptx; policy.h holds the
// score functions that slots.c uses too.
#include "resident.h"

#define NONE (-1)

// ---- order of victims: free slots first, then the lowest score, then the lowest slot; as candidate_less() in slots.c ----

struct victim {
    uint64_t key;
    uint64_t last;
    int32_t  slot;  // NONE = nobody
    int32_t  taken; // 0 free, 1 holds an expert
};

static __device__ bool before(const victim & a, const victim & b) {
    if (b.slot == NONE) {
        return a.slot != NONE;
    }
    if (a.slot == NONE) {
        return false;
    }
    if (a.taken != b.taken) {
        return a.taken < b.taken;
    }
    if (a.key != b.key) {
        return a.key < b.key;
    }
    if (a.last != b.last) {
        return a.last < b.last;
    }
    return a.slot < b.slot;
}

static __device__ victim shuffle_min(victim v) {
    for (int offset = 16; offset; offset >>= 1) {
        victim o;
        o.key   = __shfl_xor_sync(~0u, v.key, offset);
        o.last  = __shfl_xor_sync(~0u, v.last, offset);
        o.slot  = __shfl_xor_sync(~0u, v.slot, offset);
        o.taken = __shfl_xor_sync(~0u, v.taken, offset);
        if (before(o, v)) {
            v = o;
        }
    }
    return v;
}

// The first of all threads' candidates, the same in every thread.
static __device__ victim block_min(victim v) {
    __shared__ victim per_warp[TSG_COMMIT_THREADS / 32];
    v = shuffle_min(v);
    if (threadIdx.x % 32 == 0) {
        per_warp[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = per_warp[threadIdx.x % (blockDim.x / 32)];
    v = shuffle_min(v);
    __syncthreads();
    return v;
}

// ---- what this step wants ----

struct step {
    uint32_t wanted[TSG_MAX_EXPERTS / 32];  // bit per expert of the layer
    int32_t  expert[TSG_STEP_THREADS];      // distinct experts, ascending
    int32_t  slot[TSG_STEP_THREADS];        // their slots
    int32_t  missing[TSG_STEP_THREADS];     // indices into expert[] of those to copy
    int32_t  n_distinct;
    int32_t  n_miss;
    int32_t  n_chosen;
};

static __device__ bool wants(const step & s, const tsg_dev_layer & layer, int32_t id) {
    const int32_t expert = id - layer.first;
    return expert >= 0 && expert < layer.n_expert && (s.wanted[expert / 32] >> (expert % 32) & 1);
}

static __device__ int32_t rank_of(const step & s, int32_t expert) {
    int32_t rank = 0;
    for (int32_t w = 0; w < expert / 32; w++) {
        rank += __popc(s.wanted[w]);
    }
    return rank + __popc(s.wanted[expert / 32] & ((1u << (expert % 32)) - 1));
}

static __device__ void lookup(step & s, const tsg_dev_pool & pool, const tsg_dev_layer & layer, int32_t expert) {
    const int32_t n_words = (layer.n_expert + 31) / 32;
    for (int32_t w = threadIdx.x; w < n_words; w += blockDim.x) {
        s.wanted[w] = 0;
    }
    __syncthreads();
    const bool first = expert != NONE && !(atomicOr(&s.wanted[expert / 32], 1u << (expert % 32)) & (1u << (expert % 32)));
    __syncthreads();
    if (first) {
        const int32_t rank = rank_of(s, expert);
        s.expert[rank]     = expert;
        s.slot[rank]       = pool.slot_of[layer.first + expert];
    }
    const int32_t n_distinct = __syncthreads_count(first);
    const bool    miss       = (int32_t) threadIdx.x < n_distinct && s.slot[threadIdx.x] == NONE;
    const int32_t n_miss     = __syncthreads_count(miss);
    if (miss) {
        int32_t at = 0;
        for (int32_t i = 0; i < (int32_t) threadIdx.x; i++) {
            at += s.slot[i] == NONE;
        }
        s.missing[at] = threadIdx.x;
    }
    if (threadIdx.x == 0) {
        s.n_distinct = n_distinct;
        s.n_miss     = n_miss;
    }
    __syncthreads();
}

// Pinned experts are nobody's victims.
static __device__ victim candidate(const tsg_dev_pool & pool, int32_t slot, enum tsg_policy policy, uint64_t now) {
    const int32_t id = pool.expert_in[slot];
    victim        v  = { 0, 0, slot, id >= 0 };
    if (id >= 0) {
        const tsg_score score = tsg_policy_score(policy, &pool.use[id], now, pool.period);
        v.key                 = score.key;
        v.last                = score.last;
        v.slot                = pool.pinned[id] ? NONE : slot;
    }
    return v;
}

// The first victim behind `last` among this thread's slots. With `s`, experts that this step wants are spared.
static __device__ victim next_victim(const step * s, const tsg_dev_pool & pool, const tsg_dev_layer * layer, enum tsg_policy policy, uint64_t now, const victim & last) {
    victim best = { 0, 0, NONE, 0 };
    for (int32_t slot = threadIdx.x; slot < pool.n_slots; slot += blockDim.x) {
        if (s && wants(*s, *layer, pool.expert_in[slot])) {
            continue;
        }
        const victim v = candidate(pool, slot, policy, now);
        if (before(v, best) && (last.slot == NONE || before(last, v))) {
            best = v;
        }
    }
    return best;
}

// Gives every missing expert the slot of a victim: from the list that tsg_commit left, else by a search.
static __device__ void choose(step & s, const tsg_dev_pool & pool, const tsg_dev_layer & layer, enum tsg_policy policy, uint64_t now) {
    if (threadIdx.x < 32) {
        const int32_t  lane = threadIdx.x;
        const int32_t  slot = lane < pool.state->n_victims ? pool.state->victims[lane] : NONE;
        const int32_t  id   = slot != NONE ? pool.expert_in[slot] : NONE;
        const uint32_t free = __ballot_sync(~0u, slot != NONE && !(id >= 0 && wants(s, layer, id)));
        const int32_t  at   = __popc(free & ((1u << lane) - 1));
        if (__popc(free) >= s.n_miss && (free >> lane & 1) && at < s.n_miss) {
            s.slot[s.missing[at]] = slot;
        }
        if (lane == 0) {
            s.n_chosen = __popc(free) >= s.n_miss ? s.n_miss : 0;
        }
    }
    __syncthreads();
    if (s.n_chosen == s.n_miss) {
        return;
    }
    victim last = { 0, 0, NONE, 0 };
    for (int32_t m = 0; m < s.n_miss; m++) {
        last = block_min(next_victim(&s, pool, &layer, policy, now, last));
        if (threadIdx.x == 0) {
            s.slot[s.missing[m]] = last.slot;
        }
    }
    __syncthreads();
}

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

// Copies the missing experts. The pieces follow each other without a gap: where one ends, the next begins with the next block in turn.
static __device__ uint64_t gather(const step & s, const tsg_dev_layer & layer) {
    uint64_t bytes = 0;
    uint32_t turn  = 0;
    for (int32_t m = 0; m < s.n_miss; m++) {
        const uint64_t expert = s.expert[s.missing[m]];
        const uint64_t slot   = s.slot[s.missing[m]];
        for (int32_t b = 0; b < layer.n_banks; b++) {
            const uint64_t size = layer.bank[b].bytes;
            copy_bytes(layer.bank[b].slots + slot * size, layer.bank[b].host + expert * size, size, (blockIdx.x + gridDim.x - turn) % gridDim.x, gridDim.x);
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
    const uint64_t slow  = s.n_miss ? *ps_per_byte : 0;
    const uint64_t start = slow ? nanoseconds() : 0;
    if (s.n_miss) {
        choose(s, pool, layer, (enum tsg_policy) pool.state->policy, pool.state->clock);
    }
    if (blockIdx.x == 0) {
        if (expert != NONE) {
            slot_ids[i] = s.slot[rank_of(s, expert)];
        }
        if (i < s.n_distinct) {
            pool.state->expert[i] = s.expert[i];
            pool.state->slot[i]   = s.slot[i];
        }
        if (i == 0) {
            pool.state->n_distinct = s.n_distinct;
        }
    }
    const uint64_t bytes = gather(s, layer);
    while (slow && nanoseconds() - start < bytes * slow / 1000) {
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
