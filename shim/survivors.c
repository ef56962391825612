// survivors.c - who stays when a pool gets another number of slots, and where: pure bookkeeping.
//
// The experts that the policy would evict last stay, the pinned ones before all others. Whoever lies in a slot that there still is stays in it, so that
// most of the bytes need not move among each other; in a pool that holds everything slot = expert, as its readers expect.
#include "slots.h"

#include <stdlib.h>
#include <string.h>

struct rank {
    struct tsg_score score;
    bool             pinned;
    int32_t          place;  // in its layer
    int32_t          expert;
};

// Equal scores, as after a time in which everything was resident and nobody looked: every layer keeps as many, its first.
static int who_stays_first(const void * a, const void * b) {
    const struct rank * x = a, * y = b;
    if (x->pinned != y->pinned) {
        return x->pinned ? -1 : 1;
    }
    if (tsg_score_less(x->score, y->score) || tsg_score_less(y->score, x->score)) {
        return tsg_score_less(y->score, x->score) ? -1 : 1;
    }
    if (x->place != y->place) {
        return x->place - y->place;
    }
    return x->expert - y->expert;
}

static int32_t rank_residents(const struct tsg_slots * old, const int32_t * place, struct rank * ranks) {
    int32_t n = 0;
    for (int32_t x = 0; x < old->n_experts; x++) {
        if (old->slot_of[x] >= 0) {
            const struct tsg_score score = tsg_policy_score(old->policy, &old->use[x], old->clock, old->period);
            ranks[n++] = (struct rank) { .score = score, .pinned = old->pinned[x], .place = place[x], .expert = x };
        }
    }
    qsort(ranks, (size_t) n, sizeof(struct rank), who_stays_first);
    return n;
}

static void put(struct tsg_slots * slots, int32_t expert, int32_t slot, int32_t was, int32_t * from) {
    slots->slot_of[expert] = slot;
    slots->expert_in[slot] = expert;
    from[slot]             = was;
    slots->n_used++;
}

static void place_survivors(const struct tsg_slots * old, struct tsg_slots * out, const struct rank * ranks, int32_t n, int32_t * from) {
    for (int32_t i = 0; i < n; i++) {
        const int32_t was = old->slot_of[ranks[i].expert];
        if (was < out->n_slots) {
            put(out, ranks[i].expert, was, was, from);
        }
    }
    int32_t next = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t was = old->slot_of[ranks[i].expert];
        while (was >= out->n_slots && out->expert_in[next] >= 0) {
            next++;
        }
        if (was >= out->n_slots) {
            put(out, ranks[i].expert, next, was, from);
        }
    }
}

// Segments of SLRU: those who left are in none, and fewer slots protect fewer.
static void keep_segments(struct tsg_slots * slots) {
    for (int32_t x = 0; x < slots->n_experts; x++) {
        slots->use[x].segment = slots->slot_of[x] >= 0 ? slots->use[x].segment : 0;
        slots->n_protected   += (int32_t) slots->use[x].segment;
    }
    while ((int64_t) slots->n_protected * 100 > (int64_t) slots->n_slots * TSG_PROTECTED_SHARE) {
        int32_t oldest = -1;
        for (int32_t x = 0; x < slots->n_experts; x++) {
            if (slots->use[x].segment && (oldest < 0 || slots->use[x].last < slots->use[oldest].last)) {
                oldest = x;
            }
        }
        slots->use[oldest].segment = 0;
        slots->n_protected--;
    }
}

bool tsg_slots_resized(const struct tsg_slots * old, int32_t n_slots, const int32_t * place, struct tsg_slots * out, int32_t * from) {
    const size_t  n       = (size_t) old->n_experts;
    struct rank * ranks   = malloc(n * sizeof(struct rank));
    const bool    all     = n_slots == old->n_experts;
    if (!ranks || !tsg_slots_init(out, old->policy, n_slots, old->n_experts, (int32_t) old->period)) {
        free(ranks);
        return false;
    }
    out->clock    = old->clock;
    out->n_pinned = old->n_pinned;
    memcpy(out->pinned, old->pinned, n * sizeof(bool));
    memcpy(out->use, old->use, n * sizeof(struct tsg_use));
    memcpy(out->hits, old->hits, n * sizeof(uint64_t));
    memcpy(out->misses, old->misses, n * sizeof(uint64_t));
    memcpy(out->prefill, old->prefill, n * sizeof(uint64_t));
    for (int32_t s = 0; s < n_slots; s++) {
        from[s] = -1;
    }
    const int32_t n_ranks = rank_residents(old, place, ranks);
    if (all) {
        for (int32_t x = 0; x < old->n_experts; x++) {
            put(out, x, x, old->slot_of[x], from);
        }
    } else {
        place_survivors(old, out, ranks, n_ranks < n_slots ? n_ranks : n_slots, from);
    }
    keep_segments(out);
    free(ranks);
    return true;
}
