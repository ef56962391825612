// test_traces.c - slots.c against slots_reference.h on random traces: after every step everything that can be seen of the pool is the same.
#include "check.h"
#include "slots.h"
#include "slots_reference.h"

struct trace {
    int32_t n_slots, n_layers, n_expert, n_used;
};

// `n` distinct experts of a layer, half of them from its popular quarter, so that there are hits.
static void pick_experts(uint64_t * seed, int32_t n_expert, int32_t first, int32_t n, int32_t * experts) {
    for (int32_t i = 0; i < n;) {
        experts[i] = first + random_below(seed, random_below(seed, 2) ? 1 + n_expert / 4 : n_expert);
        i += !ref_contains(experts, i, experts[i]);
    }
}

static void random_acquire(struct ref * r, struct tsg_slots * s, struct tsg_counts * counts, const struct trace * t, uint64_t * seed) {
    const bool           wide  = random_below(seed, 4) == 0;
    const int32_t        n     = wide ? 1 + random_below(seed, t->n_expert) : t->n_used;
    const enum tsg_phase phase = wide && random_below(seed, 2) ? TSG_PREFILL : TSG_DECODE;
    const enum tsg_admit admit = wide && random_below(seed, 2) ? TSG_ADMIT_FREE : TSG_ADMIT_ALL;
    const int32_t        limit = random_below(seed, n + 1);
    const int32_t        first = random_below(seed, t->n_layers) * t->n_expert;
    int32_t              experts[REF_MAX] = { 0 }, slot[REF_MAX], ref_slot[REF_MAX];
    struct tsg_load      loads[REF_MAX], ref_loads[REF_MAX];
    pick_experts(seed, t->n_expert, first, n, experts);
    const int32_t want = ref_acquire(r, experts, n, phase, admit, limit, ref_slot, ref_loads);
    const int32_t got  = tsg_slots_acquire(s, experts, n, phase, admit, limit, slot, loads, counts);
    CHECK(got == want);
    if (got < 0) {
        CHECK(s->clock - r->clock <= 1);
        r->clock = s->clock;  // whether that was a tick is a test of its own
        return;
    }
    CHECK(memcmp(slot, ref_slot, sizeof(int32_t) * (size_t) n) == 0);
    CHECK(memcmp(loads, ref_loads, sizeof(struct tsg_load) * (size_t) got) == 0);
}

static void random_step(struct ref * r, struct tsg_slots * s, struct tsg_counts * counts, const struct trace * t, uint64_t * seed) {
    const int32_t   expert = random_below(seed, r->n_experts);
    const int32_t   action = random_below(seed, 100);
    struct tsg_load load;
    int32_t         slot;
    if (action < 5) {
        const int32_t keep = random_below(seed, 2) ? t->n_used : 0;
        CHECK(tsg_slots_pin(s, expert, keep) == ref_pin(r, expert, keep));
    } else if (action < 15) {
        tsg_slots_unpin(s, expert);
        r->expert[expert].pinned = false;
    } else if (action < 19) {
        CHECK(tsg_slots_evict(s, expert) == ref_evict(r, expert));
    } else if (action < 23) {
        CHECK(tsg_slots_load(s, expert, &load, counts) == ref_load(r, expert, &slot));
        CHECK(load.expert == expert && load.slot == slot);
        CHECK(s->clock - r->clock <= 1);
        r->clock = s->clock;
    } else if (action < 24) {
        const enum tsg_policy policy = (enum tsg_policy) random_below(seed, 5);
        tsg_slots_set_policy(s, policy);
        ref_set_policy(r, policy);
    } else {
        random_acquire(r, s, counts, t, seed);
    }
}

static void random_trace(const struct trace * t, enum tsg_policy policy, uint64_t seed) {
    static struct ref r;
    struct tsg_slots  s;
    struct tsg_counts counts = { 0 };
    ref_init(&r, policy, t->n_slots, t->n_layers * t->n_expert, t->n_layers);
    CHECK(tsg_slots_init(&s, policy, t->n_slots, t->n_layers * t->n_expert, t->n_layers));
    ref_compare(&r, &s, &counts);
    for (int i = 0; i < 1000; i++) {
        random_step(&r, &s, &counts, t, &seed);
        ref_compare(&r, &s, &counts);
    }
    CHECK(counts.hits > 0 && counts.misses > 0);
    tsg_slots_free(&s);
}

static void random_traces(void) {
    const struct trace traces[] = {
        { 2, 3, 8, 2 },     // exactly one token's experts
        { 3, 3, 8, 2 },     // one more
        { 5, 1, 16, 4 },
        { 12, 3, 8, 2 },    // half
        { 23, 3, 8, 2 },    // all but one
        { 24, 3, 8, 2 },    // all
        { 100, 2, 100, 8 }, // steps of more than 64 experts
        { 1, 2, 4, 1 },
    };
    for (size_t i = 0; i < sizeof(traces) / sizeof(traces[0]); i++) {
        for (enum tsg_policy policy = TSG_POLICY_LFRU; policy <= TSG_POLICY_FIFO; policy++) {
            random_trace(&traces[i], policy, 1 + 100 * i + (uint64_t) policy);
        }
    }
}

int main(int argc, char ** argv) {
    const struct test tests[] = {
        TEST(random_traces),
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
