#include "slots.h"

#include <stdlib.h>
#include <string.h>

bool tsg_slots_init(struct tsg_slots * slots, enum tsg_policy policy, int32_t n_slots, int32_t n_experts, int32_t period) {
    *slots = (struct tsg_slots) {
        .policy    = policy,
        .n_slots   = n_slots,
        .n_experts = n_experts,
        .n_open    = n_slots,
        .clock     = 1,  // 0 is "never"
        .period    = (uint64_t) period,
        .slot_of   = malloc(sizeof(int32_t) * (size_t) n_experts),
        .expert_in = malloc(sizeof(int32_t) * (size_t) n_slots),
        .pinned    = calloc((size_t) n_experts, sizeof(bool)),
        .loading   = calloc((size_t) n_experts, sizeof(bool)),
        .use       = calloc((size_t) n_experts, sizeof(struct tsg_use)),
        .in_step   = calloc((size_t) n_slots, sizeof(uint64_t)),
        .hits      = calloc((size_t) n_experts, sizeof(uint64_t)),
        .misses    = calloc((size_t) n_experts, sizeof(uint64_t)),
        .prefill   = calloc((size_t) n_experts, sizeof(uint64_t)),
    };
    if (!slots->slot_of || !slots->expert_in || !slots->pinned || !slots->loading || !slots->use || !slots->in_step || !slots->hits || !slots->misses ||
        !slots->prefill) {
        tsg_slots_free(slots);
        return false;
    }
    for (int32_t e = 0; e < n_experts; e++) {
        slots->slot_of[e] = -1;
    }
    for (int32_t s = 0; s < n_slots; s++) {
        slots->expert_in[s] = -1;
    }
    return true;
}

void tsg_slots_free(struct tsg_slots * slots) {
    free(slots->slot_of);
    free(slots->expert_in);
    free(slots->pinned);
    free(slots->loading);
    free(slots->use);
    free(slots->in_step);
    free(slots->hits);
    free(slots->misses);
    free(slots->prefill);
    *slots = (struct tsg_slots) { 0 };
}

// ---- victims ----

struct candidate {
    struct tsg_score score;
    int32_t          slot;
};

// Free slots come first, then the lowest scores; equal scores go by slot number, so that a trace repeats exactly.
static bool candidate_less(const struct tsg_slots * slots, struct candidate a, struct candidate b) {
    const bool free_a = slots->expert_in[a.slot] < 0;
    const bool free_b = slots->expert_in[b.slot] < 0;
    if (free_a != free_b) {
        return free_a;
    }
    if (!free_a && (tsg_score_less(a.score, b.score) || tsg_score_less(b.score, a.score))) {
        return tsg_score_less(a.score, b.score);
    }
    return a.slot < b.slot;
}

static bool evictable(const struct tsg_slots * slots, int32_t slot) {
    const int32_t expert = slots->expert_in[slot];
    return expert < 0 || (!slots->pinned[expert] && !slots->loading[expert] && slots->in_step[slot] != slots->clock);
}

// The `n` best victims in order as scored at tick `now`, in one pass over the slots. Returns how many there are.
static int32_t find_victims(const struct tsg_slots * slots, int32_t n, bool free_only, uint64_t now, struct candidate * best) {
    int32_t found = 0;
    for (int32_t s = 0; s < slots->n_open && n > 0; s++) {
        const int32_t expert = slots->expert_in[s];
        if (!evictable(slots, s) || (free_only && expert >= 0)) {
            continue;
        }
        struct candidate c = { .slot = s };
        if (expert >= 0) {
            c.score = tsg_policy_score(slots->policy, &slots->use[expert], now, slots->period);
        }
        if (found == n && !candidate_less(slots, c, best[n - 1])) {
            continue;
        }
        int32_t i = found < n ? found++ : n - 1;
        for (; i > 0 && candidate_less(slots, c, best[i - 1]); i--) {
            best[i] = best[i - 1];
        }
        best[i] = c;
    }
    return found;
}

// ---- changes of residency ----

static void unload(struct tsg_slots * slots, int32_t slot) {
    const int32_t expert = slots->expert_in[slot];
    slots->n_protected -= (int32_t) slots->use[expert].segment;
    slots->use[expert].segment = 0;
    slots->slot_of[expert]     = -1;
    slots->expert_in[slot]     = -1;
    slots->n_used--;
}

static void load(struct tsg_slots * slots, int32_t expert, int32_t slot, struct tsg_counts * counts) {
    if (slots->expert_in[slot] >= 0) {
        unload(slots, slot);
        counts->evictions++;
    }
    slots->expert_in[slot]    = expert;
    slots->slot_of[expert]    = slot;
    slots->use[expert].loaded = slots->clock;
    slots->use[expert].last   = slots->clock;
    slots->in_step[slot]      = slots->clock;
    slots->n_used++;
}

// SLRU: the expert joins the protected segment; if that is full, its least recently used member leaves it.
static void protect(struct tsg_slots * slots, int32_t expert) {
    if (slots->use[expert].segment) {
        return;
    }
    slots->use[expert].segment = 1;
    slots->n_protected++;
    if (slots->n_protected * 100 <= slots->n_slots * TSG_PROTECTED_SHARE) {
        return;
    }
    int32_t oldest = -1;
    for (int32_t s = 0; s < slots->n_slots; s++) {
        const int32_t e = slots->expert_in[s];
        if (e >= 0 && slots->use[e].segment && (oldest < 0 || slots->use[e].last < slots->use[oldest].last)) {
            oldest = e;
        }
    }
    slots->use[oldest].segment = 0;
    slots->n_protected--;
}

// ---- a layer step ----

// A step that cannot be met did not happen.
static int32_t give_up(struct tsg_slots * slots, const int32_t * slot, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (slot[i] >= 0) {
            slots->in_step[slot[i]] = 0;
        }
    }
    slots->clock--;
    return -1;
}

int32_t tsg_slots_acquire(struct tsg_slots * slots, const int32_t * experts, int32_t n, enum tsg_phase phase, enum tsg_admit admit,
                          int32_t max_loads, int32_t * slot, struct tsg_load * loads, struct tsg_counts * counts) {
    slots->clock++;
    int32_t n_miss = 0;
    for (int32_t i = 0; i < n; i++) {
        slot[i] = slots->slot_of[experts[i]];
        if (slot[i] >= 0) {
            slots->in_step[slot[i]] = slots->clock;
        } else {
            n_miss++;
        }
    }

    struct candidate   few[64];
    struct candidate * victims = few;
    const int32_t      wanted  = admit == TSG_ADMIT_FREE && max_loads < n_miss ? max_loads : n_miss;
    if (wanted > (int32_t) (sizeof(few) / sizeof(few[0]))) {
        victims = malloc(sizeof(struct candidate) * (size_t) wanted);
        if (!victims) {
            return give_up(slots, slot, n);
        }
    }
    const int32_t n_victims = find_victims(slots, wanted, admit == TSG_ADMIT_FREE, slots->clock - 1, victims);
    if (admit == TSG_ADMIT_ALL && n_victims < n_miss) {
        if (victims != few) {
            free(victims);
        }
        return give_up(slots, slot, n);
    }

    // First all loads, then all counts, then all promotions: the order in which resident.cu, where threads run side by side, can do it too.
    int32_t n_loads = 0;
    for (int32_t i = 0; i < n; i++) {
        if (slot[i] >= 0) {
            slots->hits[experts[i]]++;
            continue;
        }
        slots->misses[experts[i]]++;
        if (n_loads < n_victims) {
            slot[i]          = victims[n_loads].slot;
            loads[n_loads++] = (struct tsg_load) { .expert = experts[i], .slot = slot[i] };
            load(slots, experts[i], slot[i], counts);
        }
    }
    for (int32_t i = 0; i < n; i++) {
        if (phase == TSG_DECODE) {
            tsg_use_count(&slots->use[experts[i]], slots->clock, slots->period);
        } else {
            slots->prefill[experts[i]]++;  // it says nothing about what decode will want
        }
    }
    for (int32_t i = 0; i < n && phase == TSG_DECODE && slots->policy == TSG_POLICY_SLRU; i++) {
        if (slot[i] >= 0 && slots->use[experts[i]].loaded != slots->clock) {
            protect(slots, experts[i]);
        }
    }
    counts->lookups += (uint64_t) n;
    counts->hits    += (uint64_t) (n - n_miss);
    counts->misses  += (uint64_t) n_miss;
    if (victims != few) {
        free(victims);
    }
    return n_loads;
}

static uint32_t popularity(const struct tsg_slots * slots, int32_t expert) {
    return tsg_use_freq(&slots->use[expert], slots->clock, slots->period);
}

bool tsg_slots_admit(struct tsg_slots * slots, int32_t expert, bool earned, struct tsg_load * out, struct tsg_counts * counts) {
    struct candidate victim;
    if (find_victims(slots, 1, false, slots->clock, &victim) == 0) {
        return false;
    }
    const int32_t leaves = slots->expert_in[victim.slot];
    if (earned && leaves >= 0 && popularity(slots, expert) <= popularity(slots, leaves)) {
        return false;
    }
    load(slots, expert, victim.slot, counts);
    *out = (struct tsg_load) { .expert = expert, .slot = victim.slot };
    return true;
}

// ---- by hand ----

void tsg_slots_clear(struct tsg_slots * slots, int32_t slot) {
    if (slots->expert_in[slot] >= 0) {
        unload(slots, slot);
    }
}

void tsg_slots_put(struct tsg_slots * slots, int32_t expert, int32_t slot) {
    struct tsg_counts uncounted = { 0 };
    if (slots->slot_of[expert] >= 0) {
        unload(slots, slots->slot_of[expert]);
    }
    load(slots, expert, slot, &uncounted);
}

void tsg_slots_fill(struct tsg_slots * slots) {
    for (int32_t e = 0; e < slots->n_experts; e++) {
        slots->slot_of[e]   = e;
        slots->expert_in[e] = e;
    }
    slots->n_used = slots->n_experts;
}

bool tsg_slots_load(struct tsg_slots * slots, int32_t expert, struct tsg_load * out, struct tsg_counts * counts) {
    *out = (struct tsg_load) { .expert = expert, .slot = -1 };
    if (slots->slot_of[expert] >= 0) {
        return true;
    }
    slots->clock++;
    struct candidate victim;
    if (find_victims(slots, 1, false, slots->clock - 1, &victim) == 0) {
        slots->clock--;
        return false;
    }
    load(slots, expert, victim.slot, counts);
    out->slot = victim.slot;
    return true;
}

bool tsg_slots_preload(struct tsg_slots * slots, int32_t expert, struct tsg_load * out) {
    int32_t slot = slots->n_open - 1;
    while (slot >= 0 && slots->expert_in[slot] >= 0) {
        slot--;
    }
    if (slot < 0 || slots->slot_of[expert] >= 0) {
        return false;
    }
    struct tsg_counts none = { 0 };  // nobody leaves
    load(slots, expert, slot, &none);
    *out = (struct tsg_load) { .expert = expert, .slot = slot };
    return true;
}

bool tsg_slots_pin(struct tsg_slots * slots, int32_t expert, int32_t keep_free) {
    if (slots->pinned[expert]) {
        return true;
    }
    if (slots->slot_of[expert] < 0 || slots->n_open - slots->n_pinned - 1 < keep_free) {
        return false;
    }
    slots->pinned[expert] = true;
    slots->n_pinned++;
    return true;
}

void tsg_slots_unpin(struct tsg_slots * slots, int32_t expert) {
    if (slots->pinned[expert]) {
        slots->pinned[expert] = false;
        slots->n_pinned--;
    }
}

bool tsg_slots_evict(struct tsg_slots * slots, int32_t expert) {
    if (slots->pinned[expert] || slots->slot_of[expert] >= slots->n_open) {
        return false;
    }
    if (slots->slot_of[expert] >= 0) {
        unload(slots, slots->slot_of[expert]);
    }
    return true;
}

void tsg_slots_set_policy(struct tsg_slots * slots, enum tsg_policy policy) {
    slots->policy      = policy;
    slots->n_protected = 0;
    for (int32_t e = 0; e < slots->n_experts; e++) {
        slots->use[e].segment = 0;
    }
}

// ---- integrity ----

const char * tsg_slots_check(const struct tsg_slots * slots) {
    int32_t used = 0, pinned = 0, segment = 0;
    if (slots->n_open < 0 || slots->n_open > slots->n_slots) {
        return "more slots are kept for whole layers than there are";
    }
    for (int32_t s = 0; s < slots->n_slots; s++) {
        const int32_t e = slots->expert_in[s];
        if (e < -1 || e >= slots->n_experts) {
            return "a slot names an expert that does not exist";
        }
        if (e >= 0 && slots->slot_of[e] != s) {
            return "a slot holds an expert that lies elsewhere";
        }
        used += e >= 0;
    }
    int32_t resident = 0;
    for (int32_t e = 0; e < slots->n_experts; e++) {
        const int32_t s = slots->slot_of[e];
        if (s < -1 || s >= slots->n_slots) {
            return "an expert lies in a slot that does not exist";
        }
        if (s >= 0 && slots->expert_in[s] != e) {
            return "an expert lies in a slot that holds another";
        }
        if (s < 0 && (slots->pinned[e] || slots->loading[e] || slots->use[e].segment)) {
            return "an expert without a slot is pinned, protected or on its way";
        }
        resident += s >= 0;
        pinned   += slots->pinned[e];
        segment  += (int32_t) slots->use[e].segment;
    }
    if (used != slots->n_used || resident != used || pinned != slots->n_pinned || segment != slots->n_protected) {
        return "the counts of used, pinned or protected slots are wrong";
    }
    return NULL;
}
