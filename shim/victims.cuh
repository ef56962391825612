// victims.cuh - what a step wants and who leaves for it, for resident.cu.
#pragma once

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
    tsg_dev_load load[TSG_STEP_THREADS];    // the same, with their slots
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
