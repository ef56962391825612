// test_experts.c - single experts by hand: look, read back, pin, prefetch, evict, and when that is not possible.
#include "rig.h"

static const struct spec small = { .type = GGML_TYPE_Q8_0, .tables = true, .n_layers = 2, .n_expert = { 8, 8 }, .n_used = 2, .n_slots = 6 };

static struct tsg_expert get(struct rig * rig, int32_t layer, int32_t expert) {
    struct tsg_expert out;
    CHECK(tsg_expert_get(rig->pager, layer, expert, &out) == TSG_OK);
    return out;
}

static void pin_prefetch_evict(void) {
    struct rig rig = rig_open(&small);
    CHECK(get(&rig, 1, 3).slot == -1 && get(&rig, 1, 3).last_use == 0);
    CHECK(tsg_expert_prefetch(rig.pager, 1, 3) == TSG_OK && get(&rig, 1, 3).slot == 0 && !get(&rig, 1, 3).pinned);
    CHECK(tsg_expert_prefetch(rig.pager, 1, 3) == TSG_OK && rig_stats(&rig).slots_used == 1);
    CHECK(tsg_expert_pin(rig.pager, 0, 3, true) == TSG_OK && get(&rig, 0, 3).slot == 1 && get(&rig, 0, 3).pinned);
    rig_check_slots(&rig);
    const uint64_t bytes = rig_stats(&rig).phase[TSG_DECODE].bytes_link;
    CHECK(bytes == 2 * (rig_stats(&rig).host_bytes / 16 + (N_FF + N_FF + N_EMBD + 3) * sizeof(float)));
    CHECK(tsg_expert_evict(rig.pager, 1, 3) == TSG_OK && get(&rig, 1, 3).slot == -1);
    CHECK(tsg_expert_evict(rig.pager, 1, 3) == TSG_OK);
    CHECK(rig_failed(tsg_expert_evict(rig.pager, 0, 3), TSG_E_STATE, "pinned"));
    for (uint64_t seed = 1; seed < 20; seed++) {  // pinned experts stay
        rig_compare_random(&rig, rig.paged.backend, seed % 4 ? 2 : 40, seed);
        CHECK(get(&rig, 0, 3).slot == 1);
    }
    // Four of six may be pinned: a token needs two.
    CHECK(tsg_expert_pin(rig.pager, 0, 0, true) == TSG_OK && tsg_expert_pin(rig.pager, 0, 1, true) == TSG_OK);
    CHECK(tsg_expert_pin(rig.pager, 1, 1, true) == TSG_OK && tsg_expert_pin(rig.pager, 1, 1, true) == TSG_OK);
    CHECK(rig_failed(tsg_expert_pin(rig.pager, 1, 2, true), TSG_E_STATE, "4 of 6 slots are pinned"));
    rig_compare_random(&rig, rig.paged.backend, 1, 50);
    rig_compare_random(&rig, rig.paged.backend, 8, 51);
    CHECK(tsg_expert_pin(rig.pager, 0, 3, false) == TSG_OK && tsg_expert_pin(rig.pager, 0, 3, false) == TSG_OK);
    CHECK(tsg_expert_pin(rig.pager, 1, 2, true) == TSG_OK && tsg_pager_check_integrity(rig.pager) == TSG_OK);
    rig_check_slots(&rig);
    rig_close(&rig);
}

static void preloading_fills_free_slots(void) {
    struct rig rig = rig_open(&small);
    bool       loaded;
    for (int32_t e = 0; e < 8; e++) {
        CHECK(tsg_expert_preload(rig.pager, 1, e, &loaded) == TSG_OK && loaded == (e < 6) && get(&rig, 1, e).slot == (e < 6 ? 5 - e : -1));
    }
    CHECK(tsg_expert_preload(rig.pager, 1, 0, &loaded) == TSG_OK && !loaded);  // it is there
    const struct tsg_counts decode = rig_stats(&rig).phase[TSG_DECODE];
    CHECK(rig_stats(&rig).slots_used == 6 && decode.lookups == 0 && decode.bytes_link == 0 && decode.evictions == 0);
    CHECK(get(&rig, 1, 0).uses == 0 && tsg_pager_check_integrity(rig.pager) == TSG_OK);
    rig_check_slots(&rig);
    for (uint64_t seed = 1; seed < 10; seed++) {
        rig_compare_random(&rig, rig.paged.backend, seed % 3 ? 2 : 40, seed);
    }
    CHECK(rig_failed(tsg_expert_preload(rig.pager, 1, 8, &loaded), TSG_E_ARGUMENT, "there is no weight"));
    rig_close(&rig);
}

static void slots_are_read_back(void) {
    struct rig   rig = rig_open(&small);
    const void * host;
    size_t       size;
    uint8_t      slot[4096];
    CHECK(tsg_expert_host(rig.pager, 0, 5, 2, &host, &size) == TSG_OK && size <= sizeof(slot));
    CHECK(rig_failed(tsg_expert_read_slot(rig.pager, 0, 5, 2, slot, size), TSG_E_STATE, "in no slot"));
    CHECK(rig_failed(tsg_expert_read_slot(rig.pager, 0, 5, 2, slot, size - 1), TSG_E_ARGUMENT, "bytes an expert"));
    CHECK(tsg_expert_prefetch(rig.pager, 0, 4) == TSG_OK && tsg_expert_prefetch(rig.pager, 0, 5) == TSG_OK);
    CHECK(tsg_expert_read_slot(rig.pager, 0, 5, 2, slot, size) == TSG_OK && memcmp(slot, host, size) == 0);
    rig_close(&rig);
}

static void experts_that_do_not_exist(void) {
    struct rig        rig      = rig_open(&small);
    const int32_t     bad[][3] = { { -1, 0, 0 }, { 2, 0, 0 }, { 0, -1, 0 }, { 0, 8, 0 }, { 0, 0, -1 }, { 0, 0, 3 } };
    struct tsg_expert out[8];
    const void *      host;
    size_t            size;
    for (size_t i = 0; i < 6; i++) {
        const int32_t l = bad[i][0], e = bad[i][1], p = bad[i][2];
        CHECK(rig_failed(tsg_expert_host(rig.pager, l, e, p, &host, &size), TSG_E_ARGUMENT, "there is no weight"));
        CHECK(rig_failed(tsg_expert_read_slot(rig.pager, l, e, p, out, 1), TSG_E_ARGUMENT, "there is no weight"));
        if (p == 0) {
            CHECK(tsg_expert_get(rig.pager, l, e, out) == TSG_E_ARGUMENT && tsg_expert_pin(rig.pager, l, e, true) == TSG_E_ARGUMENT);
            CHECK(tsg_expert_prefetch(rig.pager, l, e) == TSG_E_ARGUMENT && tsg_expert_evict(rig.pager, l, e) == TSG_E_ARGUMENT);
            CHECK(e != 0 || tsg_expert_get_layer(rig.pager, l, out) == TSG_E_ARGUMENT);
        }
    }
    rig_close(&rig);
}

static void not_possible_yet(struct rig * rig) {
    uint8_t slot[4096];
    bool    loaded;
    CHECK(tsg_expert_preload(rig->pager, 0, 0, &loaded) == TSG_E_STATE);
    CHECK(tsg_expert_pin(rig->pager, 0, 0, true) == TSG_E_STATE && tsg_expert_prefetch(rig->pager, 0, 0) == TSG_E_STATE);
    CHECK(tsg_expert_pin(rig->pager, 0, 0, false) == TSG_E_STATE && tsg_expert_evict(rig->pager, 0, 0) == TSG_E_STATE);
    const size_t size = rig->pager->layers[0]->weight[0].bytes;
    CHECK(size <= sizeof(slot) && tsg_expert_read_slot(rig->pager, 0, 0, 0, slot, size) == TSG_E_STATE);
}

static void experts_before_commit(void) {
    struct rig        rig = rig_new(&small);
    struct tsg_expert out[8];
    not_possible_yet(&rig);
    CHECK(tsg_expert_get(rig.pager, 0, 0, out) == TSG_E_STATE && tsg_expert_get_layer(rig.pager, 0, out) == TSG_E_STATE);
    tsg_pager_free(rig.pager);
}

static void experts_before_the_model_is_loaded(void) {
    for (int64_t n_slots = 6; n_slots <= 16; n_slots += 10) {  // paged, and all resident
        struct spec spec = small;
        spec.n_slots     = n_slots;
        struct rig rig   = rig_new(&spec);
        CHECK(tsg_pager_commit(rig.pager) == TSG_OK);
        not_possible_yet(&rig);
        tsg_pager_free(rig.pager);
    }
}

static void experts_of_a_pool_of_everything(void) {
    struct spec spec = small;
    spec.n_slots     = 16;
    struct rig rig   = rig_open(&spec);
    for (int32_t i = 0; i < 16; i++) {
        CHECK(get(&rig, i / 8, i % 8).slot == i);
        CHECK(rig_failed(tsg_expert_evict(rig.pager, i / 8, i % 8), TSG_E_STATE, "holds all"));
        CHECK(tsg_expert_prefetch(rig.pager, i / 8, i % 8) == TSG_OK && tsg_expert_pin(rig.pager, i / 8, i % 8, true) == TSG_OK);
    }
    rig_check_slots(&rig);
    rig_compare_random(&rig, rig.paged.backend, 8, 1);
    CHECK(tsg_pager_check_integrity(rig.pager) == TSG_OK && rig_stats(&rig).phase[TSG_DECODE].bytes_link == 0);
    rig_close(&rig);
}

static void last_use_is_the_number_of_the_graph(void) {
    const struct spec spec = { .type = GGML_TYPE_F32, .n_layers = 4, .n_expert = { 8, 8, 8, 8 }, .n_used = 2, .n_slots = 20 };
    struct rig        rig  = rig_open(&spec);
    for (uint64_t graph = 1; graph < 6; graph++) {
        struct batch * batch = batch_random(&spec, 1, graph);
        rig_compare(&rig, batch);
        for (int32_t l = 0; l < 4; l++) {
            CHECK(get(&rig, l, batch->order[l][0]).last_use == graph && get(&rig, l, batch->order[l][1]).last_use == graph);
        }
        free(batch);
    }
    rig_close(&rig);
}

int main(int argc, char ** argv) {
    const struct test tests[] = {
        TEST(pin_prefetch_evict),
        TEST(preloading_fills_free_slots),
        TEST(slots_are_read_back),
        TEST(experts_that_do_not_exist),
        TEST(experts_before_commit),
        TEST(experts_before_the_model_is_loaded),
        TEST(experts_of_a_pool_of_everything),
        TEST(last_use_is_the_number_of_the_graph),
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
