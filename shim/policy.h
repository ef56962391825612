// policy.h - eviction policies as score functions. The victim is the slot whose expert has the lowest score.
//
// Integers only: the same functions serve the C engine and, compiled for the device, the CUDA engine, and both must pick the same victims.
// Time is the pool's clock: one tick per layer step, `period` ticks per graph (one decoded token).
#pragma once

#include "tsg.h"

#ifdef __CUDACC__
#define TSG_INLINE static __device__ inline
#else
#define TSG_INLINE static inline
#endif

#define TSG_FREQ_ONE        (1u << 16)  // one use, in the 16.16 fixed point of tsg_use.freq
#define TSG_HALF_LIFE       128         // graphs after which a use counts half. Undecayed LFRU loses to LRU in decode
#define TSG_PROTECTED_SHARE 80          // per cent of the slots that SLRU protects

// What a pool knows of one expert. It outlives eviction: an expert that comes back keeps its popularity.
struct tsg_use {
    uint64_t last;     // tick of the last decode use or load
    uint64_t loaded;   // tick of the last load
    uint64_t freq_at;  // tick at which freq was right
    uint32_t freq;     // decayed count of decode uses
    uint32_t segment;  // SLRU: 0 probation, 1 protected
};

struct tsg_score {
    uint64_t key;   // the policy's own order
    uint64_t last;  // ties: least recently used first
};

// freq after `age` ticks: halved every half_life, linear between (exact at the ends, at most 6 % high between).
TSG_INLINE uint32_t tsg_decay(uint32_t freq, uint64_t age, uint64_t half_life) {
    if (age == 0 || freq == 0) {
        return freq;
    }
    uint64_t halvings, rest;
    if ((age | half_life) >> 32 == 0) {  // the usual case: a 64-bit division costs a GPU half a microsecond on the way of every token
        halvings = (uint32_t) age / (uint32_t) half_life;
        rest     = (uint32_t) age % (uint32_t) half_life;
    } else {
        halvings = age / half_life;
        rest     = age % half_life;
    }
    if (halvings >= 32) {
        return 0;
    }
    const uint64_t f = freq >> halvings;
    return (uint32_t) (f - f * rest / (2 * half_life));
}

TSG_INLINE uint32_t tsg_use_freq(const struct tsg_use * use, uint64_t now, uint64_t period) {
    return tsg_decay(use->freq, now - use->freq_at, TSG_HALF_LIFE * period);
}

// Counts one decode use.
TSG_INLINE void tsg_use_count(struct tsg_use * use, uint64_t now, uint64_t period) {
    const uint32_t freq = tsg_use_freq(use, now, period);
    use->freq    = freq > UINT32_MAX - TSG_FREQ_ONE ? UINT32_MAX : freq + TSG_FREQ_ONE;
    use->freq_at = now;
    use->last    = now;
}

TSG_INLINE struct tsg_score tsg_policy_score(enum tsg_policy policy, const struct tsg_use * use, uint64_t now, uint64_t period) {
    struct tsg_score score = { 0, use->last };
    switch (policy) {
        case TSG_POLICY_LRU:
            break;
        case TSG_POLICY_FIFO:
            score.key = use->loaded;
            break;
        case TSG_POLICY_LFU:
            score.key = tsg_use_freq(use, now, period);
            break;
        case TSG_POLICY_SLRU:
            score.key = use->segment;
            break;
        case TSG_POLICY_LFRU:
            // frequency over age in ticks; one period is added so that the experts of the running graph do not divide by almost nothing
            score.key = ((uint64_t) tsg_use_freq(use, now, period) << 24) / (now - use->last + period);
            break;
    }
    return score;
}

TSG_INLINE bool tsg_score_less(struct tsg_score a, struct tsg_score b) {
    return a.key != b.key ? a.key < b.key : a.last < b.last;
}
