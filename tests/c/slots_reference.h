// slots_reference.h - what slots.h promises, written the slow way: every question is answered by a scan over all slots or experts, a victim is
// looked for one at a time, nothing is counted in advance. Only tsg_decay, which is the definition of a decayed count, is shared with the shim.
#pragma once

#include "check.h"
#include "slots.h"

enum { REF_MAX = 512 };  // experts or slots

struct ref_expert {
    bool     pinned;
    bool     is_protected;
    uint64_t last, loaded, freq_at;
    uint32_t freq;
    uint64_t hits, misses;
};

struct ref {
    enum tsg_policy   policy;
    int32_t           n_slots, n_experts;
    uint64_t          clock, period;
    int32_t           holds[REF_MAX];  // slot -> expert, -1 = free
    struct ref_expert expert[REF_MAX];
    struct tsg_counts counts;
};

static void ref_init(struct ref * r, enum tsg_policy policy, int32_t n_slots, int32_t n_experts, int32_t period) {
    memset(r, 0, sizeof(*r));
    r->policy    = policy;
    r->n_slots   = n_slots;
    r->n_experts = n_experts;
    r->clock     = 1;
    r->period    = (uint64_t) period;
    for (int32_t s = 0; s < n_slots; s++) {
        r->holds[s] = -1;
    }
}

static int32_t ref_slot_of(const struct ref * r, int32_t expert) {
    for (int32_t s = 0; s < r->n_slots; s++) {
        if (r->holds[s] == expert) {
            return s;
        }
    }
    return -1;
}

static bool ref_contains(const int32_t * list, int32_t n, int32_t value) {
    for (int32_t i = 0; i < n; i++) {
        if (list[i] == value) {
            return true;
        }
    }
    return false;
}

// What the policy ranks experts by, at the tick before the step; ties go to the least recently used.
static uint64_t ref_rank(const struct ref * r, int32_t expert) {
    const struct ref_expert * x    = &r->expert[expert];
    const uint64_t            now  = r->clock - 1;
    const uint64_t            freq = tsg_decay(x->freq, now - x->freq_at, 128 * r->period);
    switch (r->policy) {
        case TSG_POLICY_LRU:
            return x->last;
        case TSG_POLICY_FIFO:
            return x->loaded;
        case TSG_POLICY_LFU:
            return freq;
        case TSG_POLICY_SLRU:
            return x->is_protected;
        case TSG_POLICY_LFRU:
            return freq * 16777216 / (now - x->last + r->period);
    }
    abort();
}

// Does slot a's expert go before slot b's?
static bool ref_goes_first(const struct ref * r, int32_t a, int32_t b) {
    const int32_t x = r->holds[a], y = r->holds[b];
    if (x < 0 || y < 0) {
        return x < 0 && (y >= 0 || a < b);
    }
    if (ref_rank(r, x) != ref_rank(r, y)) {
        return ref_rank(r, x) < ref_rank(r, y);
    }
    if (r->expert[x].last != r->expert[y].last) {
        return r->expert[x].last < r->expert[y].last;
    }
    return a < b;
}

// The best victim that holds none of `step` and is none of `taken`, or -1.
static int32_t ref_victim(const struct ref * r, bool free_only, const int32_t * step, int32_t n, const int32_t * taken, int32_t n_taken) {
    int32_t best = -1;
    for (int32_t s = 0; s < r->n_slots; s++) {
        const int32_t x  = r->holds[s];
        const bool    ok = x < 0 || (!free_only && !r->expert[x].pinned && !ref_contains(step, n, x));
        if (ok && !ref_contains(taken, n_taken, s) && (best < 0 || ref_goes_first(r, s, best))) {
            best = s;
        }
    }
    return best;
}

static void ref_place(struct ref * r, int32_t expert, int32_t slot) {
    if (r->holds[slot] >= 0) {
        r->expert[r->holds[slot]].is_protected = false;
        r->counts.evictions++;
    }
    r->holds[slot]           = expert;
    r->expert[expert].last   = r->clock;
    r->expert[expert].loaded = r->clock;
}

static void ref_protect(struct ref * r, int32_t expert) {
    if (r->expert[expert].is_protected) {
        return;
    }
    r->expert[expert].is_protected = true;
    int32_t n = 0, oldest = -1;
    for (int32_t s = 0; s < r->n_slots; s++) {
        const int32_t x = r->holds[s];
        if (x >= 0 && r->expert[x].is_protected) {
            n++;
            oldest = oldest < 0 || r->expert[x].last < r->expert[oldest].last ? x : oldest;
        }
    }
    if (n > r->n_slots * 80 / 100) {
        r->expert[oldest].is_protected = false;
    }
}

// Returns the number of loads or -1; slot[i] like tsg_slots_acquire. On failure nothing changes.
static int32_t ref_acquire(struct ref * r, const int32_t * experts, int32_t n, enum tsg_phase phase, enum tsg_admit admit, int32_t max_loads,
                           int32_t * slot, struct tsg_load * loads) {
    static struct ref before;
    before = *r;
    r->clock++;
    // All victims are chosen on the state before the step, then come all loads, all counts, all promotions, each in the order of the experts.
    int32_t victims[REF_MAX], n_victims = 0;
    for (int32_t i = 0; i < n; i++) {
        if (ref_slot_of(r, experts[i]) >= 0 || (admit == TSG_ADMIT_FREE && n_victims == max_loads)) {
            continue;
        }
        const int32_t victim = ref_victim(r, admit == TSG_ADMIT_FREE, experts, n, victims, n_victims);
        if (victim < 0 && admit == TSG_ADMIT_ALL) {
            *r = before;
            return -1;
        }
        if (victim >= 0) {
            victims[n_victims++] = victim;
        }
    }
    int32_t n_loads = 0;
    for (int32_t i = 0; i < n; i++) {
        struct ref_expert * x = &r->expert[experts[i]];
        slot[i]               = ref_slot_of(r, experts[i]);
        const bool hit        = slot[i] >= 0;
        r->counts.lookups++;
        x->hits          += hit;
        x->misses        += !hit;
        r->counts.hits   += hit;
        r->counts.misses += !hit;
        if (!hit && n_loads < n_victims) {
            slot[i]        = victims[n_loads];
            loads[n_loads] = (struct tsg_load) { experts[i], slot[i] };
            n_loads++;
            ref_place(r, experts[i], slot[i]);
        }
    }
    for (int32_t i = 0; i < n && phase == TSG_DECODE; i++) {
        struct ref_expert * x    = &r->expert[experts[i]];
        const uint64_t      freq = (uint64_t) tsg_decay(x->freq, r->clock - x->freq_at, 128 * r->period) + 65536;
        x->freq                  = freq > UINT32_MAX ? UINT32_MAX : (uint32_t) freq;
        x->freq_at               = r->clock;
        x->last                  = r->clock;
    }
    for (int32_t i = 0; i < n && phase == TSG_DECODE && r->policy == TSG_POLICY_SLRU; i++) {
        if (ref_slot_of(&before, experts[i]) >= 0) {
            ref_protect(r, experts[i]);
        }
    }
    return n_loads;
}

static bool ref_load(struct ref * r, int32_t expert, int32_t * slot) {
    *slot = -1;
    if (ref_slot_of(r, expert) >= 0) {
        return true;
    }
    r->clock++;
    *slot = ref_victim(r, false, NULL, 0, NULL, 0);
    if (*slot < 0) {
        r->clock--;
        return false;
    }
    ref_place(r, expert, *slot);
    return true;
}

static bool ref_pin(struct ref * r, int32_t expert, int32_t keep_free) {
    int32_t unpinned = r->n_slots;
    for (int32_t x = 0; x < r->n_experts; x++) {
        unpinned -= r->expert[x].pinned;
    }
    if (r->expert[expert].pinned) {
        return true;
    }
    if (ref_slot_of(r, expert) < 0 || unpinned - 1 < keep_free) {
        return false;
    }
    return r->expert[expert].pinned = true;
}

static bool ref_evict(struct ref * r, int32_t expert) {
    const int32_t slot = ref_slot_of(r, expert);
    if (r->expert[expert].pinned) {
        return false;
    }
    if (slot >= 0) {
        r->holds[slot]                 = -1;
        r->expert[expert].is_protected = false;
    }
    return true;
}

static void ref_set_policy(struct ref * r, enum tsg_policy policy) {
    r->policy = policy;
    for (int32_t x = 0; x < r->n_experts; x++) {
        r->expert[x].is_protected = false;
    }
}

// Everything that can be seen of the pool is as the reference has it.
static void ref_compare(const struct ref * r, const struct tsg_slots * slots, const struct tsg_counts * counts) {
    const char * wrong = tsg_slots_check(slots);
    if (wrong) {
        fprintf(stderr, "integrity: %s\n", wrong);
    }
    CHECK(!wrong);
    int32_t n_used = 0, n_pinned = 0, n_protected = 0;
    for (int32_t s = 0; s < r->n_slots; s++) {
        CHECK(slots->expert_in[s] == r->holds[s]);
        n_used += r->holds[s] >= 0;
    }
    for (int32_t e = 0; e < r->n_experts; e++) {
        const struct ref_expert * x = &r->expert[e];
        const struct tsg_use *    u = &slots->use[e];
        CHECK(slots->slot_of[e] == ref_slot_of(r, e));
        CHECK(slots->pinned[e] == x->pinned);
        CHECK(slots->hits[e] == x->hits && slots->misses[e] == x->misses);
        CHECK(u->last == x->last && u->loaded == x->loaded && u->freq == x->freq && u->freq_at == x->freq_at);
        CHECK(u->segment == x->is_protected);
        n_pinned    += x->pinned;
        n_protected += x->is_protected;
    }
    CHECK(slots->n_used == n_used && slots->n_pinned == n_pinned && slots->n_protected == n_protected);
    CHECK(slots->clock == r->clock);
    CHECK(counts->lookups == r->counts.lookups && counts->hits == r->counts.hits && counts->misses == r->counts.misses);
    CHECK(counts->evictions == r->counts.evictions);
    CHECK(counts->hits + counts->misses == counts->lookups);
}
