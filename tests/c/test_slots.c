// test_slots.c - policy.h against its definitions, and slots.c on small traces with known victims.
#include "check.h"
#include "slots.h"

#include <math.h>

// ---- decay and scores ----

static void decay_halves_exactly_at_half_lives(void) {
    const uint32_t freqs[]      = { 0, 1, 2, 3, 1000, TSG_FREQ_ONE, 3 * TSG_FREQ_ONE, UINT32_MAX - 1, UINT32_MAX };
    const uint64_t half_lives[] = { 1, 2, 7, 128, 128 * 48, 128 * 1000000u };
    for (size_t f = 0; f < sizeof(freqs) / sizeof(freqs[0]); f++) {
        for (size_t h = 0; h < sizeof(half_lives) / sizeof(half_lives[0]); h++) {
            for (uint64_t k = 0; k < 70; k++) {
                CHECK(tsg_decay(freqs[f], k * half_lives[h], half_lives[h]) == (k < 32 ? freqs[f] >> k : 0));
            }
        }
    }
}

static void decay_is_monotone_and_close_to_exponential(void) {
    const uint64_t half_lives[] = { 1, 3, 128, 1000 };
    for (size_t h = 0; h < sizeof(half_lives) / sizeof(half_lives[0]); h++) {
        const uint64_t half_life = half_lives[h];
        uint32_t       before    = UINT32_MAX;
        for (uint64_t age = 0; age <= 35 * half_life; age++) {
            const uint32_t now   = tsg_decay(UINT32_MAX, age, half_life);
            const double   exact = UINT32_MAX * exp2(-(double) age / (double) half_life);
            CHECK(now <= before);
            CHECK(now >= exact - 2 && now <= 1.062 * exact + 2);
            CHECK(tsg_decay(TSG_FREQ_ONE, age, half_life) <= now);  // of two counts the larger stays the larger
            before = now;
        }
        CHECK(before == 0);
    }
}

static void decay_never_overflows(void) {
    uint64_t seed = 7;
    for (int i = 0; i < 100000; i++) {
        const uint32_t freq      = (uint32_t) next_random(&seed);
        const uint64_t half_life = 1 + (next_random(&seed) >> 33);  // up to 2^31: 16 million layers
        const uint64_t age       = next_random(&seed) >> random_below(&seed, 64);
        CHECK(tsg_decay(freq, age, half_life) <= freq);
    }
    CHECK(tsg_decay(UINT32_MAX, (1ull << 31) - 1, 1ull << 31) >= UINT32_MAX / 2);
    CHECK(tsg_decay(UINT32_MAX, UINT64_MAX, 1) == 0);
}

static void a_use_counts_one_and_saturates(void) {
    struct tsg_use use = { 0 };
    tsg_use_count(&use, 5, 3);
    CHECK(use.freq == TSG_FREQ_ONE && use.freq_at == 5 && use.last == 5 && use.loaded == 0);
    tsg_use_count(&use, 5 + TSG_HALF_LIFE * 3, 3);
    CHECK(use.freq == TSG_FREQ_ONE + TSG_FREQ_ONE / 2);
    for (int i = 0; i < 70000; i++) {
        tsg_use_count(&use, use.last, 3);
    }
    CHECK(use.freq == UINT32_MAX);
}

static void scores_order_as_documented(void) {
    const uint64_t now = 1000, period = 4;
    const struct tsg_use older    = { .last = 10, .loaded = 10 }, newer = { .last = 20, .loaded = 5 };
    const struct tsg_use rare     = { .last = 900, .freq = TSG_FREQ_ONE, .freq_at = 900 };
    const struct tsg_use frequent = { .last = 700, .freq = 50 * TSG_FREQ_ONE, .freq_at = 700 };
    const struct tsg_use guarded  = { .last = 1, .segment = 1 };
    #define LESS(policy, a, b) tsg_score_less(tsg_policy_score(policy, &(a), now, period), tsg_policy_score(policy, &(b), now, period))
    CHECK(LESS(TSG_POLICY_LRU, older, newer) && !LESS(TSG_POLICY_LRU, newer, older) && !LESS(TSG_POLICY_LRU, newer, newer));
    CHECK(LESS(TSG_POLICY_FIFO, newer, older) && !LESS(TSG_POLICY_FIFO, older, newer));
    CHECK(LESS(TSG_POLICY_LFU, rare, frequent) && LESS(TSG_POLICY_LFRU, rare, frequent) && LESS(TSG_POLICY_LRU, frequent, rare));
    CHECK(LESS(TSG_POLICY_SLRU, newer, guarded) && LESS(TSG_POLICY_SLRU, older, newer) && LESS(TSG_POLICY_LRU, guarded, older));
    // Equal keys: least recently used first.
    CHECK(LESS(TSG_POLICY_LFU, older, newer) && LESS(TSG_POLICY_LFRU, older, newer));
    #undef LESS
    // LFRU divides by the age plus one graph.
    const struct tsg_use just_now = { .last = now, .freq = 3 * TSG_FREQ_ONE, .freq_at = now };
    CHECK(tsg_policy_score(TSG_POLICY_LFRU, &just_now, now, period).key == (3ull * TSG_FREQ_ONE << 24) / period);
}

// ---- traces with known victims ----

static struct tsg_slots pool(enum tsg_policy policy, int32_t n_slots) {
    struct tsg_slots slots;
    CHECK(tsg_slots_init(&slots, policy, n_slots, 64, 1));
    return slots;
}

// One step with one expert; returns whether it was resident.
static bool use(struct tsg_slots * slots, int32_t expert, enum tsg_phase phase) {
    int32_t           slot;
    struct tsg_load   load;
    struct tsg_counts counts = { 0 };
    const int32_t     n      = tsg_slots_acquire(slots, &expert, 1, phase, TSG_ADMIT_ALL, 0, &slot, &load, &counts);
    CHECK(n >= 0 && slots->expert_in[slot] == expert && !tsg_slots_check(slots));
    return n == 0;
}

// A tick: a prefill step that finds no free slot changes nothing but the time.
static void wait_ticks(struct tsg_slots * slots, int n) {
    for (int i = 0; i < n; i++) {
        const int32_t     expert = 63;
        int32_t           slot;
        struct tsg_load   load;
        struct tsg_counts counts = { 0 };
        CHECK(tsg_slots_acquire(slots, &expert, 1, TSG_PREFILL, TSG_ADMIT_FREE, 0, &slot, &load, &counts) == 0 && slot == -1);
    }
}

static void play(struct tsg_slots * slots, const char * trace) {
    for (; *trace; trace++) {
        if (*trace != ' ') {
            use(slots, *trace - 'a', TSG_DECODE);
        }
    }
}

// The experts in slots, in the order of the slots: "abc", free slots as '.'.
static bool holds(const struct tsg_slots * slots, const char * experts) {
    for (int32_t s = 0; s < slots->n_slots; s++) {
        const char holds = slots->expert_in[s] < 0 ? '.' : (char) ('a' + slots->expert_in[s]);
        if (holds != experts[s]) {
            fprintf(stderr, "slot %d holds %c, not %c\n", s, holds, experts[s]);
            return false;
        }
    }
    return true;
}

static void lru_evicts_the_least_recently_used(void) {
    struct tsg_slots s = pool(TSG_POLICY_LRU, 3);
    play(&s, "ab");
    CHECK(holds(&s, "ab."));
    play(&s, "cad");
    CHECK(holds(&s, "adc"));
    play(&s, "e");
    CHECK(holds(&s, "ade"));
    play(&s, "db");
    CHECK(holds(&s, "bde"));
    tsg_slots_free(&s);
}

static void fifo_ignores_hits(void) {
    struct tsg_slots s = pool(TSG_POLICY_FIFO, 3);
    play(&s, "abcaaad");
    CHECK(holds(&s, "dbc"));
    play(&s, "bbbea");
    CHECK(holds(&s, "dea"));
    tsg_slots_free(&s);
}

static void lfu_counts_and_forgets(void) {
    struct tsg_slots s = pool(TSG_POLICY_LFU, 3);
    play(&s, "aaabbcd");
    CHECK(holds(&s, "abd"));
    play(&s, "d e");  // b and d were used twice, b longer ago
    CHECK(holds(&s, "aed"));
    play(&s, "c");  // c counts from before its eviction
    CHECK(holds(&s, "acd"));
    tsg_slots_free(&s);

    for (int waits = 0; waits < 2; waits++) {
        s = pool(TSG_POLICY_LFU, 2);
        play(&s, "aaaaaaaa");
        wait_ticks(&s, waits * 5 * TSG_HALF_LIFE);  // 8 uses are worth a quarter of one then
        play(&s, "bc");
        CHECK(holds(&s, waits ? "cb" : "ac"));
        tsg_slots_free(&s);
    }
}

static void slru_resists_a_scan(void) {
    struct tsg_slots s = pool(TSG_POLICY_SLRU, 5);
    play(&s, "aabb cdefghijklmnopqrstu");
    CHECK(s.slot_of[0] == 0 && s.slot_of[1] == 1);
    tsg_slots_free(&s);
    s = pool(TSG_POLICY_LRU, 5);
    play(&s, "aabb cdefghijklmnopqrstu");
    CHECK(holds(&s, "uqrst"));
    tsg_slots_free(&s);
}

static void slru_protects_four_of_five(void) {
    struct tsg_slots s = pool(TSG_POLICY_SLRU, 5);
    play(&s, "abcde abcd");
    CHECK(s.n_protected == 4 && !s.use[4].segment);
    play(&s, "e");  // a, the least recently used of them, goes back to probation
    CHECK(s.n_protected == 4 && s.use[4].segment && !s.use[0].segment);
    play(&s, "f");
    CHECK(holds(&s, "fbcde"));
    play(&s, "g");
    CHECK(holds(&s, "gbcde"));
    CHECK(tsg_slots_evict(&s, 1));
    CHECK(s.n_protected == 3 && !tsg_slots_check(&s));
    tsg_slots_free(&s);
}

static void lfru_weighs_frequency_and_age(void) {
    // Old but frequent beats recent but once, where LRU decides otherwise.
    struct tsg_slots s = pool(TSG_POLICY_LFRU, 2);
    play(&s, "aaaaaaaaaaaaaaaaaaaabc");
    CHECK(holds(&s, "ac"));
    tsg_slots_free(&s);
    s = pool(TSG_POLICY_LRU, 2);
    play(&s, "aaaaaaaaaaaaaaaaaaaabc");
    CHECK(holds(&s, "cb"));
    tsg_slots_free(&s);
    // Frequent but long ago loses to three uses just now, where LFU decides otherwise.
    for (int lfu = 0; lfu < 2; lfu++) {
        s = pool(lfu ? TSG_POLICY_LFU : TSG_POLICY_LFRU, 2);
        play(&s, "aaaaaaaaaaaaaaaaaaaa");
        wait_ticks(&s, 50);
        play(&s, "bbbc");
        CHECK(holds(&s, lfu ? "ac" : "cb"));
        tsg_slots_free(&s);
    }
}

static void prefill_is_no_popularity(void) {
    struct tsg_slots s = pool(TSG_POLICY_LFU, 2);
    play(&s, "abb");
    for (int i = 0; i < 10; i++) {
        CHECK(use(&s, 0, TSG_PREFILL));
    }
    CHECK(s.use[0].freq == TSG_FREQ_ONE && s.hits[0] == 10);
    play(&s, "c");
    CHECK(holds(&s, "cb"));
    tsg_slots_free(&s);
}

// ---- one step ----

static void experts_of_the_step_are_no_victims(void) {
    for (enum tsg_policy policy = TSG_POLICY_LFRU; policy <= TSG_POLICY_FIFO; policy++) {
        struct tsg_slots  s = pool(policy, 3);
        struct tsg_counts counts = { 0 };
        int32_t           slot[3];
        struct tsg_load   loads[3];
        play(&s, "abcc bcc");  // every policy would evict a
        CHECK(tsg_slots_acquire(&s, (const int32_t[]) { 3, 0, 4 }, 3, TSG_DECODE, TSG_ADMIT_ALL, 0, slot, loads, &counts) == 2);
        CHECK(slot[1] == 0 && holds(&s, slot[0] == 1 ? "ade" : "aed"));
        CHECK(loads[0].expert == 3 && loads[0].slot == slot[0] && loads[1].expert == 4 && loads[1].slot == slot[2]);
        CHECK(counts.lookups == 3 && counts.hits == 1 && counts.misses == 2 && counts.evictions == 2);
        tsg_slots_free(&s);
    }
}

static void a_step_that_cannot_be_met_changes_nothing(void) {
    struct tsg_slots  s = pool(TSG_POLICY_LRU, 3);
    struct tsg_counts counts = { 0 };
    int32_t           slot[4];
    struct tsg_load   loads[4];
    play(&s, "abc");
    CHECK(tsg_slots_pin(&s, 1, 1));
    const uint64_t last = s.use[0].last, clock = s.clock;
    CHECK(tsg_slots_acquire(&s, (const int32_t[]) { 0, 3, 4, 5 }, 4, TSG_DECODE, TSG_ADMIT_ALL, 0, slot, loads, &counts) == -1);
    CHECK(tsg_slots_acquire(&s, (const int32_t[]) { 0, 3, 4 }, 3, TSG_DECODE, TSG_ADMIT_ALL, 0, slot, loads, &counts) == -1);
    CHECK(holds(&s, "abc") && s.use[0].last == last && s.hits[0] == 0 && s.misses[3] == 0 && counts.lookups == 0 && counts.evictions == 0);
    CHECK(s.clock == clock);  // a second try is the same step of the same graph, not the next one
    CHECK(tsg_slots_acquire(&s, (const int32_t[]) { 3, 4 }, 2, TSG_DECODE, TSG_ADMIT_ALL, 0, slot, loads, &counts) == 2);
    CHECK(holds(&s, "dbe"));
    tsg_slots_free(&s);
}

static void free_slots_only_up_to_the_limit(void) {
    struct tsg_slots  s = pool(TSG_POLICY_LRU, 4);
    struct tsg_counts counts = { 0 };
    int32_t           slot[4];
    struct tsg_load   loads[4];
    play(&s, "a");
    CHECK(tsg_slots_acquire(&s, (const int32_t[]) { 1, 0, 2, 3 }, 4, TSG_PREFILL, TSG_ADMIT_FREE, 2, slot, loads, &counts) == 2);
    CHECK(holds(&s, "abc.") && slot[0] == 1 && slot[1] == 0 && slot[2] == 2 && slot[3] == -1 && counts.misses == 3);
    CHECK(tsg_slots_acquire(&s, (const int32_t[]) { 4, 5 }, 2, TSG_PREFILL, TSG_ADMIT_FREE, 2, slot, loads, &counts) == 1);
    CHECK(holds(&s, "abce") && slot[1] == -1 && counts.evictions == 0);
    tsg_slots_free(&s);
}

static void a_step_of_many_experts(void) {  // more victims than fit on the stack of the shim
    struct tsg_slots  s;
    struct tsg_counts counts = { 0 };
    int32_t           experts[200], slot[200];
    struct tsg_load   loads[200];
    for (int32_t e = 0; e < 200; e++) {
        experts[e] = 199 - e;
    }
    CHECK(tsg_slots_init(&s, TSG_POLICY_LRU, 150, 200, 1));
    CHECK(tsg_slots_acquire(&s, experts, 151, TSG_DECODE, TSG_ADMIT_ALL, 0, slot, loads, &counts) == -1);
    CHECK(tsg_slots_acquire(&s, experts, 150, TSG_DECODE, TSG_ADMIT_ALL, 0, slot, loads, &counts) == 150);
    CHECK(s.expert_in[0] == 199 && s.expert_in[149] == 50 && s.n_used == 150 && !tsg_slots_check(&s));
    CHECK(tsg_slots_acquire(&s, experts + 50, 150, TSG_DECODE, TSG_ADMIT_ALL, 0, slot, loads, &counts) == 50);
    CHECK(s.expert_in[0] == 49 && s.expert_in[49] == 0 && counts.evictions == 50 && !tsg_slots_check(&s));
    tsg_slots_free(&s);
}

// ---- by hand ----

static void pins_hold_and_leave_room(void) {
    struct tsg_slots  s = pool(TSG_POLICY_LRU, 4);
    struct tsg_counts counts = { 0 };
    struct tsg_load   load;
    play(&s, "abcd");
    CHECK(!tsg_slots_pin(&s, 5, 0));  // not resident
    CHECK(tsg_slots_pin(&s, 0, 2) && tsg_slots_pin(&s, 1, 2) && tsg_slots_pin(&s, 1, 2));
    CHECK(!tsg_slots_pin(&s, 2, 2) && s.n_pinned == 2);
    CHECK(!tsg_slots_evict(&s, 0) && holds(&s, "abcd"));
    play(&s, "efgh");
    CHECK(holds(&s, "abgh"));
    tsg_slots_unpin(&s, 0);
    tsg_slots_unpin(&s, 0);
    CHECK(s.n_pinned == 1);
    CHECK(tsg_slots_load(&s, 9, &load, &counts) && load.slot == 0 && counts.evictions == 1 && counts.lookups == 0);
    CHECK(tsg_slots_load(&s, 9, &load, &counts) && load.slot == -1);
    CHECK(tsg_slots_evict(&s, 9) && tsg_slots_evict(&s, 9) && holds(&s, ".bgh") && !tsg_slots_check(&s));
    tsg_slots_free(&s);
}

static void a_load_that_cannot_be_met_changes_nothing(void) {
    struct tsg_slots  s = pool(TSG_POLICY_LRU, 2);
    struct tsg_counts counts = { 0 };
    struct tsg_load   load;
    play(&s, "ab");
    CHECK(tsg_slots_pin(&s, 0, 0) && tsg_slots_pin(&s, 1, 0));
    const uint64_t clock = s.clock;
    CHECK(!tsg_slots_load(&s, 2, &load, &counts));
    CHECK(holds(&s, "ab") && s.clock == clock && counts.evictions == 0);
    tsg_slots_free(&s);
}

static void preloading_fills_free_slots_from_the_end(void) {
    const enum tsg_policy policies[] = { TSG_POLICY_LRU, TSG_POLICY_LFU, TSG_POLICY_LFRU, TSG_POLICY_SLRU, TSG_POLICY_FIFO };
    for (size_t i = 0; i < 5; i++) {
        struct tsg_slots s = pool(policies[i], 3);
        struct tsg_load  load;
        use(&s, 0, TSG_PREFILL);
        CHECK(tsg_slots_preload(&s, 5, &load) && load.slot == 2 && load.expert == 5 && !tsg_slots_preload(&s, 5, &load));
        CHECK(tsg_slots_preload(&s, 6, &load) && load.slot == 1 && holds(&s, "agf"));
        CHECK(!tsg_slots_preload(&s, 7, &load) && holds(&s, "agf") && !tsg_slots_check(&s));  // full: nobody leaves
        use(&s, 8, TSG_DECODE);
        CHECK(holds(&s, "igf"));
        use(&s, 8, TSG_DECODE);
        use(&s, 9, TSG_DECODE);
        CHECK(holds(&s, "ijf"));  // the first that was preloaded stays longest
        tsg_slots_free(&s);
    }
}

static void uses_of_prefill_are_counted_apart(void) {
    struct tsg_slots s = pool(TSG_POLICY_LFRU, 2);
    use(&s, 1, TSG_PREFILL);
    use(&s, 1, TSG_PREFILL);
    use(&s, 1, TSG_DECODE);
    CHECK(s.hits[1] == 2 && s.misses[1] == 1 && s.prefill[1] == 2);
    tsg_slots_free(&s);
}

static void a_full_pool_is_the_identity(void) {
    struct tsg_slots s;
    CHECK(tsg_slots_init(&s, TSG_POLICY_LFRU, 10, 10, 2));
    tsg_slots_fill(&s);
    for (int32_t e = 0; e < 10; e++) {
        CHECK(s.slot_of[e] == e && s.expert_in[e] == e);
    }
    CHECK(s.n_used == 10 && !tsg_slots_check(&s));
    tsg_slots_free(&s);
}

static void the_integrity_check_sees_damage(void) {
    struct tsg_slots s = pool(TSG_POLICY_SLRU, 3);
    play(&s, "aab");
    CHECK(!tsg_slots_check(&s));
    #define DAMAGE(field, value)                    \
        do {                                        \
            const int32_t keep = (int32_t) (field); \
            (field)            = (value);           \
            CHECK(tsg_slots_check(&s));             \
            (field) = keep;                         \
            CHECK(!tsg_slots_check(&s));            \
        } while (0)
    DAMAGE(s.n_used, 1);
    DAMAGE(s.n_open, -1);
    DAMAGE(s.n_open, s.n_slots + 1);
    DAMAGE(s.n_pinned, 1);
    DAMAGE(s.n_protected, 0);
    DAMAGE(s.slot_of[0], -1);
    DAMAGE(s.slot_of[5], 0);
    DAMAGE(s.slot_of[5], 3);
    DAMAGE(s.expert_in[2], 0);
    DAMAGE(s.expert_in[2], 64);
    DAMAGE(s.pinned[7], true);
    #undef DAMAGE
    tsg_slots_free(&s);
}

int main(int argc, char ** argv) {
    const struct test tests[] = {
        TEST(decay_halves_exactly_at_half_lives),
        TEST(decay_is_monotone_and_close_to_exponential),
        TEST(decay_never_overflows),
        TEST(a_use_counts_one_and_saturates),
        TEST(scores_order_as_documented),
        TEST(lru_evicts_the_least_recently_used),
        TEST(fifo_ignores_hits),
        TEST(lfu_counts_and_forgets),
        TEST(slru_resists_a_scan),
        TEST(slru_protects_four_of_five),
        TEST(lfru_weighs_frequency_and_age),
        TEST(prefill_is_no_popularity),
        TEST(experts_of_the_step_are_no_victims),
        TEST(a_step_that_cannot_be_met_changes_nothing),
        TEST(free_slots_only_up_to_the_limit),
        TEST(a_step_of_many_experts),
        TEST(pins_hold_and_leave_room),
        TEST(a_load_that_cannot_be_met_changes_nothing),
        TEST(preloading_fills_free_slots_from_the_end),
        TEST(uses_of_prefill_are_counted_apart),
        TEST(a_full_pool_is_the_identity),
        TEST(the_integrity_check_sees_damage),
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
