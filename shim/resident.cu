// resident.cu - a decode step of one expert layer on the device: which routed experts are resident, who leaves, copy what is missing, ids to slots.
//
// Three kernels, no host. tsg_step stands in the way of the token and does only what the layer's first matmul waits for: every block computes the same lookup
// and the same victims from state that nobody changes meanwhile, then copies its share of the missing experts from mapped host memory; no block waits for
// another. tsg_rest does the same for what only the layer's last matmul reads (down), while the first computes. tsg_commit runs beside the matmuls: it writes
// the new state and ranks the victims of the next step. Compiled to PTX by scripts/make-ptx; policy.h holds the score functions that slots.c uses too.
#include "copy.cuh"
#include "victims.cuh"

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

// How many of the lanes in `mask` have a lower expert. All lanes take part.
static __device__ int32_t below(int32_t expert, uint32_t mask) {
    int32_t n = 0;
    for (int32_t other = 0; other < 32; other++) {
        const int32_t theirs = __shfl_sync(~0u, expert, other);
        n += theirs != NONE && theirs < expert && (mask >> other & 1);
    }
    return n;
}

// In one warp: gives the lanes in `missing` the slots of those who leave, in order. False if there are not enough.
static __device__ bool take_slots(step & s, const tsg_dev_layer & layer, int32_t expert, uint32_t missing, int32_t leaves, int32_t was, int32_t & slot) {
    const int32_t lane   = threadIdx.x;
    const int32_t n_miss = __popc(missing);
    bool          wanted = false;
    for (int32_t other = 0; other < 32; other++) {
        const int32_t theirs = __shfl_sync(~0u, expert, other);
        wanted |= theirs != NONE && was == layer.first + theirs;
    }
    const uint32_t free = __ballot_sync(~0u, leaves != NONE && !wanted);
    const int32_t  at   = __popc(free & ((1u << lane) - 1));
    if (__popc(free) < n_miss) {
        return false;
    }
    if ((free >> lane & 1) && at < n_miss) {
        s.load[at].slot = leaves;
    }
    __syncwarp();
    const int32_t number = below(expert, missing);
    if (missing >> lane & 1) {
        slot                  = s.load[number].slot;
        s.load[number].expert = expert;
    }
    return true;
}

// The usual step, one token of up to 32 experts, in one warp. `leaves` is the lane's slot in the list that tsg_commit left, `was` the expert in it. Returns
// false if that list is too short: nothing was done.
static __device__ bool quick_step(step & s, const tsg_dev_pool & pool, const tsg_dev_layer & layer, int32_t expert, int32_t leaves, int32_t was, int32_t * slot_ids) {
    const int32_t  lane    = threadIdx.x;
    int32_t        slot    = expert != NONE ? pool.slot_of[layer.first + expert] : 0;
    const uint32_t same    = __match_any_sync(~0u, expert);  // by all lanes: a lane that does not take part would hang the others
    const bool     lead    = expert != NONE && __ffs(same) - 1 == lane;
    const uint32_t missing = __ballot_sync(~0u, lead && slot == NONE);
    const int32_t  n_miss  = __popc(missing);
    if (lane == 0) {
        s.n_miss = n_miss;
    }
    if (n_miss == 0 && (!slot_ids || blockIdx.x != 0)) {
        return true;
    }
    if (n_miss && !take_slots(s, layer, lead ? expert : NONE, missing, leaves, was, slot)) {
        return false;
    }
    slot = __shfl_sync(~0u, slot, __ffs(same) - 1);
    __syncwarp();
    if (!slot_ids || blockIdx.x != 0) {
        return true;
    }
    if (expert != NONE) {
        slot_ids[lane] = slot;
    }
    const int32_t rank = below(lead ? expert : NONE, ~0u);
    if (lead) {
        pool.state->expert[rank] = expert;
        pool.state->slot[rank]   = slot;
    }
    const int32_t n_distinct = __popc(__ballot_sync(~0u, lead));
    if (lane == 0) {
        pool.state->n_distinct = n_distinct;
    }
    return true;
}

// Any step, by the whole block.
static __device__ void full_step(step & s, const tsg_dev_pool & pool, const tsg_dev_layer & layer, int32_t expert, int32_t * slot_ids) {
    const int32_t i = threadIdx.x;
    lookup(s, pool, layer, expert);
    if (s.n_miss) {
        choose(s, pool, layer, (enum tsg_policy) pool.state->policy, pool.state->clock);
    }
    if (i < s.n_miss) {
        s.load[i] = { s.expert[s.missing[i]], s.slot[s.missing[i]] };
    }
    if (slot_ids && blockIdx.x == 0) {
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
    __syncthreads();
}

// Every block decides the same from what nobody changes meanwhile. `slot_ids`: the first block writes down what was decided; NULL: none does.
static __device__ void decide(step & s, const tsg_dev_pool & pool, const tsg_dev_layer & layer, const int32_t * ids, int32_t stride, int32_t n_used, int32_t n_tokens,
                              int32_t * slot_ids) {
    __shared__ bool done;
    const int32_t i      = threadIdx.x;
    const int32_t n      = n_used * n_tokens;
    const int32_t expert = i < n ? ids[i / n_used * stride + i % n_used] : NONE;
    if (i < 32) {
        const int32_t leaves = i < pool.state->n_victims ? pool.state->victims[i] : NONE;
        const int32_t was    = leaves != NONE ? pool.expert_in[leaves] : NONE;
        const bool    quick  = n <= 32 && quick_step(s, pool, layer, expert, leaves, was, slot_ids);
        if (i == 0) {
            done = quick;
        }
    }
    __syncthreads();
    if (!done) {
        full_step(s, pool, layer, expert, slot_ids);
    }
}

static __device__ void stamp(uint64_t * at) {
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        *at = nanoseconds();
    }
}

// Every block stamps when it is done; the last one counts.
static __device__ void stamp_copied(tsg_dev_time * time) {
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicMax((unsigned long long *) &time->copied, (unsigned long long) nanoseconds());
    }
}

// ids: the router's choice, [n_tokens] rows of n_used, `stride` apart; slot_ids: [n_tokens][n_used]. n_used * n_tokens <= TSG_STEP_THREADS. ps_per_byte points
// to the picoseconds that a byte must take, 0 = as fast as it goes. time: NULL unless the layer's time is taken.
extern "C" __global__ void __launch_bounds__(TSG_STEP_THREADS)
    tsg_step(const __grid_constant__ tsg_dev_pool pool, const __grid_constant__ tsg_dev_layer layer, const int32_t * ids, int32_t stride, int32_t n_used,
             int32_t n_tokens, const uint64_t * ps_per_byte, tsg_dev_time * time, int32_t * slot_ids) {
    __shared__ step s;
    const uint64_t slow = *ps_per_byte;
    if (time) {
        stamp(&time->start);
    }
    decide(s, pool, layer, ids, stride, n_used, n_tokens, slot_ids);
    if (time) {
        stamp(&time->decided);
    }
    gather(slow, s.load, s.n_miss, layer, 0, layer.n_early, [&] {
        if (threadIdx.x == 0) {
            atomicAdd(&pool.state->n_sent, 1);
        }
    });
    if (time && s.n_miss) {
        stamp_copied(time);
    }
}

#define PATIENCE_NS 50000000

// What only the layer's last matmul reads. Its turn comes when the `n_blocks` of tsg_step have asked for theirs: so the link is never idle between the two.
// Nothing hangs on it, so that the wait has an end: a debugger may run one kernel at a time.
extern "C" __global__ void __launch_bounds__(TSG_STEP_THREADS)
    tsg_rest(const __grid_constant__ tsg_dev_pool pool, const __grid_constant__ tsg_dev_layer layer, const int32_t * ids, int32_t stride, int32_t n_used,
             int32_t n_tokens, const uint64_t * ps_per_byte, tsg_dev_time * time, int32_t n_blocks) {
    __shared__ step s;
    const uint64_t slow = *ps_per_byte;
    decide(s, pool, layer, ids, stride, n_used, n_tokens, NULL);
    if (s.n_miss == 0) {
        return;
    }
    if (threadIdx.x == 0 && layer.n_early) {
        const uint64_t start = nanoseconds();
        while (*(volatile int32_t *) &pool.state->n_sent < n_blocks && nanoseconds() - start < PATIENCE_NS) {
        }
    }
    __syncthreads();
    gather(slow, s.load, s.n_miss, layer, layer.n_early, layer.n_banks, [] {});
    if (time) {
        stamp_copied(time);
    }
}

// One thread, beside the graph. `before` is where the layer before left its time, or the beginning of the graph.
extern "C" __global__ void tsg_stamp(tsg_dev_time * time, const tsg_dev_time * before, int32_t what) {
    const uint64_t now = nanoseconds();
    if (what == TSG_STAMP_LAYER) {
        const uint64_t copied = time->copied > time->decided ? time->copied : time->decided;
        time->sum.graphs++;
        time->sum.ns[TSG_ATTENTION] += time->start - before->ended;
        time->sum.ns[TSG_LOOKUP] += time->decided - time->start;
        time->sum.ns[TSG_COPY] += copied - time->decided;
        time->sum.ns[TSG_EXPERTS] += now - copied;
        time->copied = 0;
    } else if (what == TSG_STAMP_OUTPUT) {
        time->sum.graphs++;
        time->sum.ns[TSG_ATTENTION] += now - before->ended;
    }
    time->ended = now;
}

#define KEPT 3

// Lists the next victims in order: every warp those of its slots, then one warp the first of these. A thread keeps the best few of its slots at hand; only one
// whose best are all taken looks again.
static __device__ int32_t rank_victims(const tsg_dev_pool & pool, enum tsg_policy policy, uint64_t now) {
    __shared__ victim best[TSG_COMMIT_THREADS / 32][TSG_VICTIMS];
    const victim  none = { 0, 0, NONE, 0 };
    const int32_t lane = threadIdx.x % 32;
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
        const victim first = shuffle_min(kept[0]);
        if (lane == 0) {
            best[threadIdx.x / 32][found] = first;
        }
        if (first.slot != NONE && kept[0].slot == first.slot) {
            kept[0] = kept[1];
            kept[1] = kept[2];
            kept[2] = none;
            if (--left == 0) {
                kept[0] = next_victim(NULL, pool, NULL, policy, now, first);
                left    = 1;  // from here on every loss means another look
            }
        }
    }
    __syncthreads();
    int32_t found = 0;
    if (threadIdx.x < 32) {
        int32_t at = 0;
        for (; found < TSG_VICTIMS; found++) {
            const victim mine  = at < TSG_VICTIMS ? best[lane][at] : none;
            const victim first = shuffle_min(mine);
            if (first.slot == NONE) {
                break;
            }
            at += mine.slot == first.slot;
            if (lane == 0) {
                pool.state->victims[found] = first.slot;
            }
        }
    }
    return found;
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
        state->n_sent = 0;
        state->clock  = now;
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
    int32_t  b  = 0;
    uint64_t at = blockIdx.x;
    copy_chunks([&](chunk & c) {
        for (; b < stage.n_banks; b++, at = blockIdx.x) {
            const uint64_t size = stage.bytes[b];
            if (cut(c, stage.stage[b] + blockIdx.y * size, stage.slots[b] + slot * size, size, at)) {
                at += gridDim.x;
                return true;
            }
        }
        return false;
    }, [] {});
}

// Slows down copies by DMA: tsg_mark before them, tsg_delay after them on the same stream.
extern "C" __global__ void tsg_mark(uint64_t * mark) {
    *mark = nanoseconds();
}

extern "C" __global__ void tsg_delay(const uint64_t * mark, uint64_t ns) {
    while (nanoseconds() - *mark < ns) {
    }
}
