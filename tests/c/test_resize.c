// test_resize.c - pools of another size while the model is open: who stays, the same bits, what is refused, and what happens where memory is short.
#include "rig.h"

#include <threads.h>

// ---- who stays ----

enum { EXPERTS = 24, LAYERS = 3, PER_LAYER = EXPERTS / LAYERS };

static int32_t places[EXPERTS];

// A pool that has lived: random steps of one layer each, some pins.
static struct tsg_slots lived(enum tsg_policy policy, int32_t n_slots, uint64_t * seed) {
    struct tsg_slots  slots;
    struct tsg_counts counts = { 0 };
    int32_t           slot[2];
    struct tsg_load   loads[2];
    CHECK(tsg_slots_init(&slots, policy, n_slots, EXPERTS, LAYERS));
    for (int32_t i = 0; i < 200; i++) {
        const int32_t first = i % LAYERS * PER_LAYER, a = random_below(seed, PER_LAYER), b = (a + 1 + random_below(seed, 3)) % PER_LAYER;
        const int32_t want[2] = { first + (a < b ? a : b), first + (a < b ? b : a) };
        CHECK(tsg_slots_acquire(&slots, want, 2, i % 7 ? TSG_DECODE : TSG_PREFILL, TSG_ADMIT_ALL, 0, slot, loads, &counts) >= 0);
        if (i % 50 == 49) {
            CHECK(tsg_slots_pin(&slots, want[0], 2));
        }
    }
    for (int32_t x = 0; x < EXPERTS; x++) {
        places[x] = x % PER_LAYER;
    }
    return slots;
}

static struct tsg_score score_of(const struct tsg_slots * slots, int32_t expert) {
    return tsg_policy_score(slots->policy, &slots->use[expert], slots->clock, slots->period);
}

static void the_policy_says_who_stays(void) {
    uint64_t seed = 5;
    for (int32_t i = 0; i < 1000; i++) {
        const int32_t    before = 8 + random_below(&seed, 16), after = 6 + random_below(&seed, EXPERTS - 6);
        struct tsg_slots old    = lived((enum tsg_policy)(i % 5), before, &seed), out;
        int32_t          from[EXPERTS];
        CHECK(tsg_slots_resized(&old, after, places, &out, from) && !tsg_slots_check(&out) && !tsg_slots_check(&old));
        CHECK(out.n_used == (old.n_used < after ? old.n_used : after) && out.clock == old.clock && out.n_pinned == old.n_pinned);
        CHECK(out.policy == old.policy && out.period == old.period);
        for (int32_t x = 0; x < EXPERTS; x++) {
            CHECK(out.hits[x] == old.hits[x] && out.misses[x] == old.misses[x] && out.pinned[x] == old.pinned[x]);
            CHECK(out.slot_of[x] < 0 || (old.slot_of[x] >= 0 && from[out.slot_of[x]] == old.slot_of[x]));
            CHECK(old.slot_of[x] < 0 || out.slot_of[x] < 0 || old.slot_of[x] >= after || out.slot_of[x] == old.slot_of[x]);  // nobody moves without need
            for (int32_t y = 0; y < EXPERTS && old.slot_of[x] >= 0 && out.slot_of[x] < 0; y++) {  // x left: nobody who stayed would have been evicted before it
                CHECK(out.slot_of[y] < 0 || out.pinned[y] || !tsg_score_less(score_of(&old, y), score_of(&old, x)));
            }
        }
        for (int32_t s = 0; s < after; s++) {
            CHECK((out.expert_in[s] < 0) == (from[s] < 0));
        }
        CHECK((int64_t) out.n_protected * 100 <= (int64_t) after * TSG_PROTECTED_SHARE);
        tsg_slots_free(&old);
        tsg_slots_free(&out);
    }
}

static void with_room_for_all_everybody_is_at_home(void) {
    uint64_t         seed = 6;
    struct tsg_slots old  = lived(TSG_POLICY_SLRU, 9, &seed), all, few;
    int32_t          from[EXPERTS];
    CHECK(tsg_slots_resized(&old, EXPERTS, places, &all, from) && !tsg_slots_check(&all) && all.n_used == EXPERTS);
    for (int32_t x = 0; x < EXPERTS; x++) {
        CHECK(all.slot_of[x] == x && from[x] == old.slot_of[x]);
    }
    // Nobody looked meanwhile: the same ones stay as without the detour.
    CHECK(tsg_slots_resized(&all, 9, places, &few, from) && !tsg_slots_check(&few));
    for (int32_t x = 0; x < EXPERTS; x++) {
        CHECK(!old.pinned[x] || few.slot_of[x] >= 0);
    }
    tsg_slots_free(&old);
    tsg_slots_free(&all);
    tsg_slots_free(&few);
}

static void of_equals_every_layer_keeps_as_many(void) {
    uint64_t         seed = 1;
    struct tsg_slots all, few, none = lived(TSG_POLICY_LFRU, 8, &seed);
    int32_t          from[EXPERTS];
    CHECK(tsg_slots_init(&all, TSG_POLICY_LRU, EXPERTS, EXPERTS, LAYERS));
    tsg_slots_fill(&all);
    CHECK(tsg_slots_resized(&all, 12, places, &few, from));
    for (int32_t x = 0; x < EXPERTS; x++) {
        CHECK((few.slot_of[x] >= 0) == (x % PER_LAYER < 4));
    }
    tsg_slots_free(&all);
    tsg_slots_free(&few);
    tsg_slots_free(&none);
}

// ---- the same bits ----

static enum tsg_status resize(struct rig * rig, int64_t n_slots, struct tsg_resized * out) {
    const int64_t slots[2] = { n_slots, n_slots };
    return tsg_pager_resize(rig->pager, slots, out);
}

static struct tsg_expert get(struct rig * rig, int32_t layer, int32_t expert) {
    struct tsg_expert out;
    CHECK(tsg_expert_get(rig->pager, layer, expert, &out) == TSG_OK);
    return out;
}

static const struct spec small = { .type = GGML_TYPE_Q8_0, .tables = true, .n_layers = 2, .n_expert = { 8, 8 }, .n_used = 2, .n_slots = 12 };

static const struct spec specs[] = {
    { .type = GGML_TYPE_Q8_0, .tables = true, .n_layers = 4, .n_expert = { 8, 6, 8, 6 }, .n_used = 2, .n_slots = 6, .pools = true },
    { .type = GGML_TYPE_Q4_0, .fused = true, .n_layers = 3, .n_expert = { 8, 8, 8 }, .n_used = 3, .n_slots = 24 },
    { .type = GGML_TYPE_F32, .tables = true, .adapter = true, .n_layers = 2, .n_expert = { 16, 4 }, .n_used = 2, .n_slots = 5 },
    { .type = GGML_TYPE_Q8_0, .tables = true, .n_layers = 2, .n_expert = { 8, 8 }, .n_used = 2, .n_slots = 16 },
};

static bool counts_went_on(struct tsg_stats a, struct tsg_stats b) {
    bool ok = true;
    for (int i = 0; i < 2; i++) {
        ok &= b.phase[i].lookups >= a.phase[i].lookups && b.phase[i].hits >= a.phase[i].hits && b.phase[i].bytes_link >= a.phase[i].bytes_link;
    }
    return ok;
}

static void every_size_gives_the_same_bits(void) {
    for (size_t s = 0; s < sizeof(specs) / sizeof(specs[0]); s++) {
        for (int policy = TSG_POLICY_LFRU; policy <= TSG_POLICY_FIFO; policy++) {
            struct spec spec = specs[s];
            uint64_t    seed = 40 + (uint64_t) policy;
            spec.policy      = (enum tsg_policy) policy;
            struct rig rig       = rig_open(&spec);
            int64_t    n_experts = 0;
            for (int32_t l = 0; l < spec.n_layers; l++) {
                n_experts += spec.n_expert[l];
            }
            for (int32_t i = 0; i < 12; i++) {
                const int64_t      n      = i % 4 == 3 ? 1000 : spec.n_used + random_below(&seed, 24);
                struct tsg_stats   before = rig_stats(&rig);
                struct tsg_resized out;
                CHECK(resize(&rig, n, &out) == TSG_OK && out.beside);
                const struct tsg_stats after = rig_stats(&rig);
                CHECK(out.kept + out.evicted == before.slots_used && counts_went_on(before, after));
                CHECK(after.phase[TSG_DECODE].evictions - before.phase[TSG_DECODE].evictions == (uint64_t) out.evicted);
                CHECK(after.phase[TSG_DECODE].bytes_link - before.phase[TSG_DECODE].bytes_link == out.bytes_link && !out.bytes_link == !out.loaded);
                CHECK(after.all_resident == (after.slots_total == n_experts) && (n < 1000 || after.all_resident));
                CHECK(after.all_resident || out.loaded == 0 || spec.pools);
                rig_check_slots(&rig);
                rig_compare_random(&rig, rig.paged.backend, 1, 3 * (uint64_t) i + 1);
                rig_compare_random(&rig, rig.paged.backend, 40, 3 * (uint64_t) i + 2);
                rig_compare_random(&rig, rig.paged.backend, 3, 3 * (uint64_t) i + 3);
            }
            rig_close(&rig);
        }
    }
}

static void survivors_cost_nothing(void) {
    struct rig         rig = rig_open(&small);
    struct tsg_resized out;
    for (uint64_t seed = 1; seed < 9; seed++) {
        rig_compare_random(&rig, rig.paged.backend, 1, seed);
    }
    const struct tsg_stats before = rig_stats(&rig);
    CHECK(before.slots_used > 8 && resize(&rig, 8, &out) == TSG_OK);
    CHECK(out.kept == 8 && out.evicted == before.slots_used - 8 && out.loaded == 0 && out.bytes_link == 0 && out.beside);
    CHECK(rig_stats(&rig).slots_used == 8 && rig_stats(&rig).slots_total == 8 && rig_stats(&rig).pool_bytes < before.pool_bytes);
    CHECK(resize(&rig, 12, &out) == TSG_OK && out.kept == 8 && out.evicted == 0 && out.bytes_link == 0 && rig_stats(&rig).slots_used == 8);
    CHECK(resize(&rig, 12, &out) == TSG_OK && out.kept == 8 && out.beside);  // is that large
    rig_check_slots(&rig);
    // A pool of everything takes what it lacks over the link, and gives its stage away.
    CHECK(rig_stats(&rig).stage_bytes > 0 && resize(&rig, 16, &out) == TSG_OK && out.loaded == 8);
    CHECK(out.bytes_link == 8 * tsg_layer_expert_bytes(rig.pager->layers[0]) && rig_stats(&rig).stage_bytes == 0 && rig_stats(&rig).all_resident);
    rig_check_slots(&rig);
    CHECK(resize(&rig, 4, &out) == TSG_OK && out.kept == 4 && out.evicted == 12 && rig_stats(&rig).stage_bytes > 0 && !rig_stats(&rig).all_resident);
    rig_compare_random(&rig, rig.paged.backend, 8, 10);
    rig_close(&rig);
}

static void pins_stay(void) {
    struct rig         rig = rig_open(&small);
    struct tsg_resized out;
    for (uint64_t seed = 1; seed < 9; seed++) {
        rig_compare_random(&rig, rig.paged.backend, 1, seed);
    }
    for (int32_t e = 0; e < 3; e++) {
        CHECK(tsg_expert_pin(rig.pager, 1, e, true) == TSG_OK);
    }
    CHECK(rig_failed(resize(&rig, 4, &out), TSG_E_STATE, "3 experts are pinned and one token needs 2 more: 4 slots are too few, give 5"));
    CHECK(rig_failed(resize(&rig, 1, &out), TSG_E_ARGUMENT, "a pool of 1 slots cannot hold the 2 experts"));
    CHECK(rig_stats(&rig).slots_total == 12);
    for (int64_t n = 5; n <= 20; n += 5) {
        CHECK(resize(&rig, n, &out) == TSG_OK);
        rig_compare_random(&rig, rig.paged.backend, 2, (uint64_t) n);
        for (int32_t e = 0; e < 3; e++) {
            CHECK(get(&rig, 1, e).pinned && get(&rig, 1, e).slot >= 0);
        }
    }
    for (int32_t e = 0; e < 8; e++) {  // of a pool of everything, all may be pinned; a smaller one cannot hold that
        CHECK(tsg_expert_pin(rig.pager, 0, e, true) == TSG_OK);
    }
    CHECK(rig_failed(resize(&rig, 12, &out), TSG_E_STATE, "11 experts are pinned"));
    rig_close(&rig);
}

static void before_the_model_is_loaded(void) {
    struct rig         rig = rig_new(&small);
    struct tsg_resized out;
    CHECK(rig_failed(resize(&rig, 8, &out), TSG_E_STATE, "not loaded"));
    CHECK(tsg_pager_commit(rig.pager) == TSG_OK && rig_failed(resize(&rig, 8, &out), TSG_E_STATE, "not loaded"));
    tsg_pager_free(rig.pager);
}

// ---- while a reply runs ----

struct worker {
    struct rig *   rig;
    ggml_backend_t backend;
    atomic_bool    done;
};

static int work(void * data) {
    struct worker * w = data;
    for (uint64_t i = 0; i < 60; i++) {
        struct batch * batch = batch_random(&w->rig->spec, i % 5 ? 1 : 40, i + 1);
        struct graph   plain = graph_build(w->rig, &w->rig->plain, batch), paged = graph_build(w->rig, &w->rig->paged, batch);
        CHECK(ggml_backend_graph_compute(w->rig->plain.backend, plain.graph) == GGML_STATUS_SUCCESS);
        CHECK(ggml_backend_graph_compute(w->backend, paged.graph) == GGML_STATUS_SUCCESS);
        CHECK(graph_same_output(&plain, &paged));
        graph_free(&plain);
        graph_free(&paged);
        free(batch);
    }
    atomic_store(&w->done, true);
    return 0;
}

static void while_a_thread_computes(void) {
    struct rig    rig  = rig_open(&specs[0]);
    struct worker w    = { .rig = &rig, .backend = rig_backend(&rig) };
    uint64_t      seed = 3, maps = 0;
    uint8_t       resident[28];
    uint64_t      hits[28], misses[28], last_use[28];
    thrd_t        thread;
    CHECK(thrd_create(&thread, work, &w) == thrd_success);
    while (!atomic_load(&w.done)) {
        struct tsg_resized out;
        struct tsg_map     map;
        int64_t            n = 0;
        CHECK(resize(&rig, 2 + random_below(&seed, 15), &out) == TSG_OK && tsg_pager_check_integrity(rig.pager) == TSG_OK);
        CHECK(tsg_pager_map(rig.pager, &map, resident, hits, misses, last_use) == TSG_OK);
        for (int32_t i = 0; i < 28; i++) {
            n += resident[i];
            CHECK(last_use[i] <= map.tick);
        }
        CHECK(n == map.slots_used && n <= map.slots_total);
        maps++;
        thrd_yield();
    }
    CHECK(thrd_join(thread, NULL) == thrd_success && maps > 0);
    ggml_backend_free(w.backend);
    rig_close(&rig);
}

struct waiter {
    struct tsg_pager * pager;
    atomic_bool        entered;
};

static int wait_for_a_turn(void * data) {
    struct waiter * w = data;
    tsg_pager_lock(w->pager);
    atomic_store(&w->entered, true);
    tsg_pager_unlock(w->pager);
    return 0;
}

// Whoever gives the lock away gets it back after those who waited.
static void the_lock_goes_round(void) {
    struct tsg_pager * pager = rig_pager(TSG_POLICY_LFRU);
    for (int i = 0; i < 200; i++) {
        struct waiter w = { .pager = pager };
        thrd_t        thread;
        tsg_pager_lock(pager);
        CHECK(thrd_create(&thread, wait_for_a_turn, &w) == thrd_success);
        while (mtx_trylock(&pager->turn) == thrd_success) {  // it does not wait yet
            mtx_unlock(&pager->turn);
            thrd_yield();
        }
        CHECK(!atomic_load(&w.entered));
        tsg_pager_unlock(pager);
        tsg_pager_lock(pager);
        CHECK(atomic_load(&w.entered));
        tsg_pager_unlock(pager);
        CHECK(thrd_join(thread, NULL) == thrd_success);
    }
    tsg_pager_free(pager);
}

static void while_the_cpu_computes_misses(void) {
    const struct tsg_miss ways[] = { { .mode = TSG_MISS_CPU, .every = 2 }, { .mode = TSG_MISS_SPLIT, .every = 1, .link_rate = 1e9, .cpu_rate = 1e9 } };
    for (int w = 0; w < 2; w++) {
        struct rig rig = rig_new(&small);
        CHECK(tsg_pager_use_cpu(rig.pager, rig.cpu, 1) == TSG_OK);
        rig_load(&rig);
        CHECK(tsg_pager_set_miss(rig.pager, &ways[w]) == TSG_OK);
        for (uint64_t i = 0; i < 40; i++) {
            struct tsg_resized out;
            CHECK(resize(&rig, (int64_t[]) { 12, 4, 16, 2, 9 }[i % 5], &out) == TSG_OK);
            CHECK(!strstr(tsg_pager_miss(rig.pager), "every expert is resident") == (i % 5 != 2));
            rig_compare_random(&rig, rig.paged.backend, 1 + (int32_t) (i % 3), i + 1);
        }
        CHECK(rig_stats(&rig).phase[TSG_DECODE].cpu_rows > 0);
        rig_close(&rig);
    }
}

// Whole layers make way and come back, also after a size that was refused.
static void while_whole_layers_are_placed(void) {
    const struct tsg_miss layers = { .mode = TSG_MISS_LAYERS };
    const struct spec     spec   = { .type = GGML_TYPE_Q8_0, .tables = true, .n_layers = 4, .n_expert = { 8, 8, 8, 8 }, .n_used = 2, .n_slots = 20 };
    struct rig            rig    = rig_new(&spec);
    struct tsg_resized    out;
    CHECK(tsg_pager_use_cpu(rig.pager, rig.cpu, 1) == TSG_OK);
    rig_load(&rig);
    CHECK(tsg_pager_set_miss(rig.pager, &layers) == TSG_OK && rig.pager->layers[3]->whole && rig.pager->layers[2]->whole && !rig.pager->layers[1]->whole);
    for (uint64_t i = 0; i < 24; i++) {
        const int64_t n     = (int64_t[]) { 12, 4, 32, 27, 9, 2 }[i % 6];
        int64_t       whole = 0;
        CHECK(resize(&rig, n, &out) == TSG_OK && rig_failed(resize(&rig, 1, &out), TSG_E_ARGUMENT, "cannot hold"));
        for (int32_t l = 0; l < 4; l++) {
            whole += rig.pager->layers[l]->whole;
        }
        CHECK(whole == (n < 32 ? n / 8 : 0) && tsg_pager_check_integrity(rig.pager) == TSG_OK);
        rig_check_slots(&rig);
        rig_compare_random(&rig, rig.paged.backend, i % 4 == 3 ? 40 : 1 + (int32_t) (i % 3), i + 1);
    }
    rig_close(&rig);
}

// ---- a device with little memory ----

static struct {
    struct ggml_backend_device      device;
    struct ggml_backend_buffer_type buft;
    size_t                          room;    // bytes that are still free
    int                             refuse;  // so many requests from now on are refused
    void                            (*free)(ggml_backend_buffer_t buffer);
} little;

static void little_free(ggml_backend_buffer_t buffer) {
    little.room += buffer->size;
    little.free(buffer);
}

static ggml_backend_buffer_t little_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    (void) buft;
    if (little.refuse > 0 || size > little.room) {
        little.refuse -= little.refuse > 0;
        return NULL;
    }
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    little.room               -= buffer->size;
    little.free                = buffer->iface.free_buffer;
    buffer->iface.free_buffer  = little_free;
    return buffer;
}

static ggml_backend_buffer_type_t little_buffer_type(ggml_backend_dev_t dev) {
    (void) dev;
    return &little.buft;
}

static struct rig rig_with_little(const struct spec * spec) {
    struct rig rig                      = rig_new(spec);
    little.device                       = *rig.cpu;
    little.device.iface.get_buffer_type = little_buffer_type;
    little.buft                         = *ggml_backend_cpu_buffer_type();
    little.buft.iface.alloc_buffer      = little_alloc;
    little.room                         = (size_t) 1 << 40;
    little.refuse                       = 0;
    rig.pager->inner                    = &little.device;
    rig_load(&rig);
    for (uint64_t seed = 1; seed < 9; seed++) {
        rig_compare_random(&rig, rig.paged.backend, 1, seed);
    }
    return rig;
}

static void without_room_for_both_the_old_go_first(void) {
    struct rig         rig    = rig_with_little(&small);
    const size_t       expert = tsg_layer_expert_bytes(rig.pager->layers[0]);
    struct tsg_resized out;
    little.room          = 0;
    const int64_t before = rig_stats(&rig).slots_used;
    CHECK(before > 8 && resize(&rig, 8, &out) == TSG_OK);
    CHECK(!out.beside && out.kept == 8 && out.loaded == 8 && out.evicted == before - 8 && out.bytes_link == 8 * expert);
    CHECK(little.room >= 3 * expert);  // four slots less, up to the alignment
    rig_check_slots(&rig);
    rig_compare_random(&rig, rig.paged.backend, 1, 20);
    rig_compare_random(&rig, rig.paged.backend, 40, 21);
    // growing back: again not beside
    CHECK(resize(&rig, 11, &out) == TSG_OK && !out.beside && out.evicted == 0 && out.kept == out.loaded);
    rig_check_slots(&rig);
    rig_compare_random(&rig, rig.paged.backend, 3, 22);
    rig_close(&rig);
}

static void what_does_not_fit_is_refused_and_nothing_changes(void) {
    for (int pools = 0; pools < 2; pools++) {
        struct spec spec = { .type = GGML_TYPE_Q8_0, .tables = true, .pools = pools, .n_layers = 2, .n_expert = { 24, 24 }, .n_used = 2, .n_slots = 5 };
        struct rig       rig    = rig_with_little(&spec);
        struct tsg_stats before = rig_stats(&rig);
        struct tsg_resized out;
        int32_t            slots[2][24];
        for (int32_t i = 0; i < 48; i++) {
            slots[i / 24][i % 24] = get(&rig, i / 24, i % 24).slot;
        }
        little.room = tsg_layer_expert_bytes(rig.pager->layers[0]);
        CHECK(rig_failed(resize(&rig, 23, &out), TSG_E_MEMORY, "the expert cache stays as it was") && strstr(tsg_last_error(), "has no room for a pool of"));
        const struct tsg_stats after = rig_stats(&rig);
        CHECK(after.slots_used == before.slots_used && after.slots_total == before.slots_total && after.pool_bytes == before.pool_bytes);
        CHECK(after.stage_bytes == before.stage_bytes && after.phase[TSG_DECODE].evictions == before.phase[TSG_DECODE].evictions);
        for (int32_t i = 0; i < 48; i++) {
            CHECK(slots[i / 24][i % 24] == get(&rig, i / 24, i % 24).slot);
        }
        rig_check_slots(&rig);
        rig_compare_random(&rig, rig.paged.backend, 1, 30);
        rig_compare_random(&rig, rig.paged.backend, 40, 31);
        CHECK(resize(&rig, 4, &out) == TSG_OK);  // a size that fits still does
        rig_compare_random(&rig, rig.paged.backend, 1, 32);
        rig_close(&rig);
    }
}

static void where_nothing_comes_back_graphs_fail(void) {
    struct rig         rig = rig_with_little(&small);
    struct tsg_resized out;
    struct tsg_map     map;
    uint8_t            resident[16];
    uint64_t           hits[16], misses[16], last_use[16];
    little.refuse = 3;  // beside, after the old went, and the old themselves
    CHECK(rig_failed(resize(&rig, 8, &out), TSG_E_MEMORY, "load the model again"));
    struct batch * batch = batch_random(&small, 1, 1);
    struct graph   paged = graph_build(&rig, &rig.paged, batch);
    CHECK(ggml_backend_graph_compute(rig.paged.backend, paged.graph) == GGML_STATUS_FAILED);
    CHECK(rig_failed(resize(&rig, 8, &out), TSG_E_STATE, "not loaded") && tsg_expert_prefetch(rig.pager, 0, 0) == TSG_E_STATE);
    CHECK(rig_stats(&rig).pool_bytes == 0 && tsg_pager_map(rig.pager, &map, resident, hits, misses, last_use) == TSG_OK);
    graph_free(&paged);
    free(batch);
    rig_close(&rig);
}

// ---- the map ----

static void the_map_says_what_each_expert_does(void) {
    struct rig     rig = rig_open(&specs[0]);
    struct tsg_map map;
    uint8_t        resident[28];
    uint64_t       hits[28], misses[28], last_use[28];
    for (uint64_t seed = 1; seed < 6; seed++) {
        rig_compare_random(&rig, rig.paged.backend, seed == 3 ? 40 : 1, seed);
    }
    CHECK(tsg_pager_map(rig.pager, &map, resident, hits, misses, last_use) == TSG_OK);
    const struct tsg_stats stats = rig_stats(&rig);
    CHECK(memcmp(map.phase, stats.phase, sizeof(map.phase)) == 0 && map.slots_total == 12 && map.slots_used == stats.slots_used);
    CHECK(!map.all_resident && map.tick >= 4);
    for (int32_t l = 0, at = 0; l < 4; l++) {
        for (int32_t e = 0; e < rig.spec.n_expert[l]; e++, at++) {
            const struct tsg_expert x = get(&rig, l, e);
            CHECK(resident[at] == (x.slot >= 0) && hits[at] == x.hits && misses[at] == x.misses && last_use[at] == x.last_use);
        }
    }
    rig_close(&rig);
}

static void the_map_before_commit(void) {
    struct rig     rig = rig_new(&small);
    struct tsg_map map;
    CHECK(rig_failed(tsg_pager_map(rig.pager, &map, NULL, NULL, NULL, NULL), TSG_E_STATE, "not loaded"));
    tsg_pager_free(rig.pager);
}

int main(int argc, char ** argv) {
    const struct test tests[] = {
        TEST(the_policy_says_who_stays),
        TEST(with_room_for_all_everybody_is_at_home),
        TEST(of_equals_every_layer_keeps_as_many),
        TEST(every_size_gives_the_same_bits),
        TEST(survivors_cost_nothing),
        TEST(pins_stay),
        TEST(before_the_model_is_loaded),
        TEST(while_a_thread_computes),
        TEST(the_lock_goes_round),
        TEST(while_the_cpu_computes_misses),
        TEST(while_whole_layers_are_placed),
        TEST(without_room_for_both_the_old_go_first),
        TEST(what_does_not_fit_is_refused_and_nothing_changes),
        TEST(where_nothing_comes_back_graphs_fail),
        TEST(the_map_says_what_each_expert_does),
        TEST(the_map_before_commit),
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
