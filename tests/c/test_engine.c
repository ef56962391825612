// test_engine.c - graphs through the proxy device over the CPU device give the bits of the plain CPU backend: every way through the engine.
#include "rig.h"

#include "graph.h"

#include <limits.h>
#include <threads.h>

enum { SLOT_TOKENS = 32 };  // CPU_SLOT_TOKENS in engine.c: from one more on a layer goes through the stage

static const struct spec small = { .type = GGML_TYPE_F32, .n_layers = 2, .n_expert = { 8, 8 }, .n_used = 2, .n_slots = 8 };

// ---- bits ----

static void compare_sizes(struct spec spec) {
    const int32_t sizes[] = { 1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 100, 1, 8, 2 };
    int64_t       all     = 0;
    for (int32_t l = 0; l < spec.n_layers; l++) {
        all += spec.pools && l % 2 ? 0 : spec.n_expert[l];
    }
    const int64_t n_slots[] = { spec.n_used, spec.n_used + 1, all / 2, all - 1, all };
    for (size_t s = 0; s < sizeof(n_slots) / sizeof(n_slots[0]); s++) {
        spec.n_slots    = n_slots[s];
        spec.policy     = (enum tsg_policy) s;
        struct rig rig = rig_open(&spec);
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            rig_compare_random(&rig, rig.paged.backend, sizes[i], 1 + 100 * s + i);
        }
        CHECK(rig_stats(&rig).all_resident == (n_slots[s] == all));
        rig_close(&rig);
    }
}

static void bits_of_f32(void) {
    compare_sizes(small);
}

static void bits_of_q8_0_with_biases_and_scales(void) {
    struct spec spec = small;
    spec.type        = GGML_TYPE_Q8_0;
    spec.tables      = true;
    compare_sizes(spec);
}

static void bits_of_a_fused_weight_in_two_pools(void) {
    compare_sizes((struct spec) { .type = GGML_TYPE_Q4_0, .tables = true, .fused = true, .pools = true, .n_layers = 4, .n_expert = { 8, 8, 8, 8 },
                                  .n_used = 3 });
}

static void bits_of_layers_of_unequal_size(void) {
    compare_sizes((struct spec) { .type = GGML_TYPE_Q8_0, .tables = true, .n_layers = 3, .n_expert = { 8, 3, 12 }, .n_used = 2 });
}

static void an_adapter_keeps_its_weights_and_expert_ids(void) {
    struct spec spec = small;
    spec.adapter     = true;
    spec.tables      = true;
    compare_sizes(spec);
}

static void ids_from_argsort_and_in_packed_rows(void) {
    struct spec spec = small;
    spec.tables      = true;
    spec.n_slots     = 6;
    struct rig rig   = rig_open(&spec);
    for (int32_t n_tokens = 1; n_tokens < 80; n_tokens += n_tokens < 8 ? 1 : 24) {
        for (int packed = 0; packed < 2; packed++) {
            struct batch * batch = batch_random(&spec, n_tokens, (uint64_t) (1 + n_tokens));
            batch->packed        = packed;
            batch->argsort       = !packed;
            rig_compare(&rig, batch);
            free(batch);
        }
    }
    rig_close(&rig);
}

static void many_experts_in_one_step(void) {  // more than 64 misses at once
    const struct spec spec = { .type = GGML_TYPE_Q8_0, .n_layers = 2, .n_expert = { 64, 64 }, .n_used = 8, .n_slots = 127 };
    struct rig        rig  = rig_open(&spec);
    rig_compare_random(&rig, rig.paged.backend, 32, 1);
    rig_compare_random(&rig, rig.paged.backend, 100, 2);
    rig_compare_random(&rig, rig.paged.backend, 1, 3);
    rig_close(&rig);
}

static void fewer_tokens_in_the_last_layer(void) {  // those whose logits are wanted, down to none
    for (int64_t n_slots = 3; n_slots <= 16; n_slots += 13) {
        struct spec spec = small;
        spec.tables      = true;
        spec.n_slots     = n_slots;
        struct rig rig   = rig_open(&spec);
        for (int32_t n_out = 0; n_out < 4; n_out++) {
            for (int32_t n_tokens = 4; n_tokens <= 40; n_tokens += 36) {
                struct batch * batch = batch_random(&spec, n_tokens, (uint64_t) (1 + n_out));
                batch->n_out         = n_out;
                rig_compare(&rig, batch);
                free(batch);
            }
        }
        CHECK(rig_stats(&rig).phase[TSG_DECODE].graphs == 4 && rig_stats(&rig).phase[TSG_PREFILL].graphs == 4);
        rig_close(&rig);
    }
}

static void the_same_graph_again_and_again(void) {  // llama.cpp keeps its graphs: new inputs, same nodes
    struct spec spec   = small;
    spec.tables        = true;
    spec.n_slots       = 3;
    struct rig     rig = rig_open(&spec);
    struct batch * first = batch_random(&spec, 2, 1);
    struct graph   plain = graph_build(&rig, &rig.plain, first), paged = graph_build(&rig, &rig.paged, first);
    free(first);
    for (uint64_t seed = 2; seed < 30; seed++) {
        struct batch * batch = batch_random(&spec, 2, seed);
        graph_set_inputs(&plain, batch);
        graph_set_inputs(&paged, batch);
        CHECK(ggml_backend_graph_compute(rig.plain.backend, plain.graph) == GGML_STATUS_SUCCESS);
        CHECK(ggml_backend_graph_compute(rig.paged.backend, paged.graph) == GGML_STATUS_SUCCESS);
        CHECK(graph_same_output(&plain, &paged));
        free(batch);
    }
    graph_free(&plain);
    graph_free(&paged);
    rig_close(&rig);
}

static void two_threads_in_the_inner_backend(void) {
    struct rig                   rig = rig_open(&small);
    ggml_backend_reg_t           reg = ggml_backend_dev_backend_reg(tsg_pager_device(rig.pager));
    ggml_backend_set_n_threads_t set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    set(rig.paged.backend, 2);
    for (int32_t n_tokens = 1; n_tokens < 40; n_tokens += 13) {
        rig_compare_random(&rig, rig.paged.backend, n_tokens, (uint64_t) n_tokens);
    }
    CHECK(ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_abort_callback") != NULL);
    CHECK(ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts") == NULL);
    rig_close(&rig);
}

// ---- counters ----

static uint64_t n_distinct(const struct spec * spec, const struct batch * batch) {
    uint64_t n = 0;
    for (int32_t l = 0; l < spec->n_layers; l++) {
        bool seen[TSG_MAX_EXPERTS] = { false };
        for (int32_t t = 0; t < batch->n_tokens; t++) {
            for (int32_t i = 0; i < spec->n_used; i++) {
                seen[batch->order[l][t * spec->n_expert[l] + i]] = true;
            }
        }
        for (int32_t e = 0; e < spec->n_expert[l]; e++) {
            n += seen[e];
        }
    }
    return n;
}

static uint64_t expert_bytes(const struct spec * spec) {
    uint64_t bytes = 0;
    for (int32_t p = 0; p < rig_n_parts(spec); p++) {
        bytes += ggml_row_size(spec->type, rig_ne0(spec, p)) * (uint64_t) rig_ne1(spec, p);
        bytes += spec->tables ? (uint64_t) rig_ne1(spec, p) * sizeof(float) + sizeof(float) : 0;
    }
    return bytes;
}

static void counters_of_decode(void) {
    struct spec spec = small;
    spec.type        = GGML_TYPE_Q8_0;
    spec.tables      = true;
    struct rig rig   = rig_open(&spec);
    uint64_t   want  = 0;
    for (int32_t n_tokens = 1; n_tokens <= TSG_DECODE_TOKENS; n_tokens++) {
        // with 4 of 8 experts a layer in use at most, everything goes through slots
        struct batch * batch = batch_random(&spec, n_tokens < 3 ? n_tokens : 2, (uint64_t) n_tokens);
        want += n_distinct(&spec, batch);
        rig_compare(&rig, batch);
        free(batch);
    }
    const struct tsg_stats  stats = rig_stats(&rig);
    const struct tsg_counts c     = stats.phase[TSG_DECODE];
    CHECK(c.graphs == 8 && c.lookups == want && c.hits + c.misses == want && c.hits > 0 && c.streamed == 0 && c.bytes_device == 0);
    CHECK(c.bytes_link == c.misses * expert_bytes(&spec) && c.evictions == c.misses - (uint64_t) stats.slots_used);
    CHECK(stats.phase[TSG_PREFILL].lookups == 0 && stats.phase[TSG_PREFILL].graphs == 0);
    CHECK(stats.slots_total == 8 && stats.slots_used == 8 && !stats.all_resident && stats.host_tensors == 6);
    uint64_t hits = 0, misses = 0;
    for (int32_t l = 0; l < 2; l++) {
        struct tsg_expert experts[8];
        CHECK(tsg_expert_get_layer(rig.pager, l, experts) == TSG_OK);
        for (int32_t e = 0; e < 8; e++) {
            hits   += experts[e].hits;
            misses += experts[e].misses;
        }
    }
    CHECK(hits == c.hits && misses == c.misses);
    tsg_pager_reset_stats(rig.pager);
    CHECK(rig_stats(&rig).phase[TSG_DECODE].lookups == 0 && rig_stats(&rig).slots_used == 8);
    rig_close(&rig);
}

static void from_slots_to_the_stage(void) {
    struct spec spec = small;
    spec.n_slots     = 15;
    struct rig rig   = rig_open(&spec);
    rig_compare_random(&rig, rig.paged.backend, SLOT_TOKENS, 1);
    CHECK(rig_stats(&rig).phase[TSG_PREFILL].streamed == 0);
    rig_compare_random(&rig, rig.paged.backend, SLOT_TOKENS + 1, 2);
    const struct tsg_counts c = rig_stats(&rig).phase[TSG_PREFILL];
    CHECK(c.streamed == 2 && c.bytes_device == 15 * expert_bytes(&spec));  // what lies in slots is not moved over the link again
    rig_close(&rig);
}

static void a_long_prompt_of_few_experts_fills_the_cache(void) {
    struct rig     rig   = rig_open(&small);
    struct batch * batch = batch_random(&small, 50, 1);
    for (int32_t l = 0; l < 2; l++) {
        for (int32_t t = 0; t < 50; t++) {
            int32_t * order = batch->order[l] + 8 * t;
            order[0]        = 1 + t % 2;
            order[1]        = 5;
        }
    }
    rig_compare(&rig, batch);
    CHECK(rig_stats(&rig).phase[TSG_PREFILL].streamed == 2 && rig_stats(&rig).phase[TSG_PREFILL].misses == 6 && rig_stats(&rig).slots_used == 6);
    rig_compare(&rig, batch);
    CHECK(rig_stats(&rig).phase[TSG_PREFILL].misses == 6 && rig_stats(&rig).phase[TSG_PREFILL].hits == 6);
    free(batch);
    rig_close(&rig);
}

static void a_long_prompt_spares_the_working_set(void) {
    struct rig rig = rig_open(&small);
    // An empty pool: each layer takes its share of the free slots, no more.
    rig_compare_random(&rig, rig.paged.backend, 100, 1);
    for (int32_t l = 0; l < 2; l++) {
        struct tsg_expert experts[8];
        int               n = 0;
        CHECK(tsg_expert_get_layer(rig.pager, l, experts) == TSG_OK);
        for (int32_t e = 0; e < 8; e++) {
            n += experts[e].slot >= 0;
        }
        CHECK(n == 4);
    }
    // A pool in use: the prompt leaves it as decode had it.
    for (uint64_t seed = 2; seed < 6; seed++) {
        rig_compare_random(&rig, rig.paged.backend, 1, seed);
    }
    struct tsg_expert before[2][8], after[2][8];
    CHECK(tsg_expert_get_layer(rig.pager, 0, before[0]) == TSG_OK && tsg_expert_get_layer(rig.pager, 1, before[1]) == TSG_OK);
    rig_compare_random(&rig, rig.paged.backend, 100, 6);
    CHECK(tsg_expert_get_layer(rig.pager, 0, after[0]) == TSG_OK && tsg_expert_get_layer(rig.pager, 1, after[1]) == TSG_OK);
    for (int i = 0; i < 16; i++) {
        CHECK(before[i / 8][i % 8].slot == after[i / 8][i % 8].slot);
        CHECK(before[i / 8][i % 8].last_use == after[i / 8][i % 8].last_use);
    }
    rig_close(&rig);
}

static void a_pool_of_everything(void) {
    struct spec spec = small;
    spec.n_slots     = 1000;  // more than there are experts
    struct rig rig   = rig_open(&spec);
    rig_compare_random(&rig, rig.paged.backend, 3, 1);
    rig_compare_random(&rig, rig.paged.backend, 50, 2);
    const struct tsg_stats stats = rig_stats(&rig);
    CHECK(stats.all_resident && stats.slots_total == 16 && stats.slots_used == 16 && stats.stage_bytes == 0);
    // nobody reads the ids: a lookup is one routed expert of one token
    CHECK(stats.phase[TSG_DECODE].lookups == 3 * 2 * 2 && stats.phase[TSG_DECODE].hits == 12 && stats.phase[TSG_DECODE].graphs == 1);
    CHECK(stats.phase[TSG_PREFILL].lookups == 50 * 2 * 2 && stats.phase[TSG_PREFILL].hits == 200 && stats.phase[TSG_PREFILL].misses == 0);
    CHECK(stats.phase[0].bytes_link + stats.phase[1].bytes_link + stats.phase[0].bytes_device == 0);
    rig_close(&rig);
}

static void memory_nobody_filled_is_zero(void) {  // a NaN pattern in a slot that is read past the last expert would spread
    struct spec spec = small;
    spec.type        = GGML_TYPE_Q8_0;
    spec.tables      = true;
    struct rig rig   = rig_open(&spec);
    rig_compare_random(&rig, rig.paged.backend, 1, 1);
    const struct tsg_pool * pool = &rig.pager->pools[0];
    CHECK(pool->slots.n_used == 4);
    for (int32_t p = 0; p < 3; p++) {
        const size_t size = pool->layout[p].bytes;
        CHECK(pool->slot[p]->ne[2] == 8 && pool->stage[p]->ne[2] == 8);
        for (int32_t s = 0; s < 9; s++) {  // with the one behind the last
            const uint8_t * slot  = (uint8_t *) pool->slot[p]->data + (size_t) s * size;
            const uint8_t * stage = (uint8_t *) pool->stage[p]->data + (size_t) s * size;
            bool            zero = true, stage_zero = true;
            for (size_t i = 0; i < size; i++) {
                zero       &= slot[i] == 0;
                stage_zero &= stage[i] == 0;
            }
            CHECK(stage_zero && zero == (s == 8 || pool->slots.expert_in[s] < 0));
            CHECK((((float *) pool->scale[p]->data)[s] == 0) == zero);
        }
    }
    rig_close(&rig);
}

// ---- what cannot be computed ----

static void a_router_that_chooses_no_expert(void) {
    struct spec spec = small;
    spec.n_slots     = 6;
    struct rig    rig    = rig_open(&spec);
    const int32_t bad[]  = { -1, 8, INT_MAX, INT_MIN };
    const int32_t size[] = { 1, 8, 40 };
    for (size_t i = 0; i < 12; i++) {  // in the second layer: nodes of the first are patched by then
        struct batch * batch    = batch_random(&spec, size[i / 4], 1 + i);
        batch->order[1][8 * (size[i / 4] - 1) + 1] = bad[i % 4];
        struct graph         g      = graph_build(&rig, &rig.paged, batch);
        const int            n      = ggml_graph_n_nodes(g.graph);
        struct ggml_tensor * nodes  = malloc((size_t) n * sizeof(struct ggml_tensor));
        for (int j = 0; j < n; j++) {
            nodes[j] = *ggml_graph_node(g.graph, j);
        }
        CHECK(ggml_backend_graph_compute(rig.paged.backend, g.graph) == GGML_STATUS_FAILED);
        CHECK(strstr(tsg_last_error(), "blk.1.ffn_") && strstr(tsg_last_error(), "of 8"));
        for (int j = 0; j < n; j++) {
            CHECK(memcmp(&nodes[j], ggml_graph_node(g.graph, j), sizeof(struct ggml_tensor)) == 0);
        }
        graph_free(&g);
        free(nodes);
        free(batch);
        rig_compare_random(&rig, rig.paged.backend, 3, 50 + i);
    }
    rig_close(&rig);
}

static void fails_with(struct rig * rig, const struct batch * batch, const char * message) {
    struct graph g = graph_build(rig, &rig->paged, batch);
    CHECK(ggml_backend_graph_compute(rig->paged.backend, g.graph) == GGML_STATUS_FAILED);
    CHECK(strstr(tsg_last_error(), message));
    graph_free(&g);
    rig_compare_random(rig, rig->paged.backend, 3, 9);
}

static void a_view_of_an_expert_weight(void) {
    struct rig     rig    = rig_open(&small);
    struct batch * batch  = batch_random(&small, 2, 1);
    batch->view_of_weight = true;
    fails_with(&rig, batch, "through a view");
    free(batch);
    rig_close(&rig);
}

static void more_experts_a_token_than_planned(void) {  // the table of slot ids has room for n_used
    struct rig     rig   = rig_open(&small);
    struct batch * batch = batch_random(&small, SLOT_TOKENS, 1);
    batch->n_used = 5;
    fails_with(&rig, batch, "planned");
    free(batch);
    rig_close(&rig);
}

// ---- several backends, policies ----

static void two_backends_take_turns(void) {
    struct spec spec      = small;
    spec.tables           = true;
    spec.n_slots          = 3;
    struct rig     rig    = rig_open(&spec);
    ggml_backend_t second = rig_backend(&rig);
    for (uint64_t i = 1; i < 40; i++) {
        rig_compare_random(&rig, i % 2 ? rig.paged.backend : second, (int32_t) (i % 5 == 0 ? 40 : 1 + i % 8), i);
        if (i == 30) {  // freed right after its turn
            ggml_backend_free(second);
            second = rig_backend(&rig);
        }
    }
    ggml_backend_free(second);
    rig_close(&rig);
}

struct worker {
    struct rig *   rig;
    ggml_backend_t backend;
    uint64_t       seed;
};

static int work(void * arg) {
    const struct worker * w = arg;
    for (uint64_t i = 0; i < 20; i++) {
        struct batch * batch = batch_random(&w->rig->spec, i % 5 == 0 ? 40 : 2, w->seed + i);
        struct graph   g     = graph_build(w->rig, &w->rig->paged, batch);
        struct side    plain = w->rig->plain;
        plain.backend        = ggml_backend_cpu_init();
        ggml_backend_cpu_set_n_threads(plain.backend, 1);
        struct graph want = graph_build(w->rig, &plain, batch);
        CHECK(ggml_backend_graph_compute(w->backend, g.graph) == GGML_STATUS_SUCCESS);
        CHECK(ggml_backend_graph_compute(plain.backend, want.graph) == GGML_STATUS_SUCCESS);
        CHECK(graph_same_output(&want, &g));
        ggml_backend_free(plain.backend);
        graph_free(&g);
        graph_free(&want);
        free(batch);
    }
    return 0;
}

static void two_threads_with_a_backend_each(void) {
    struct rig     rig       = rig_open(&small);
    ggml_backend_t second    = rig_backend(&rig);
    struct worker  workers[] = { { &rig, rig.paged.backend, 1 }, { &rig, second, 1000 } };
    thrd_t         threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK(thrd_create(&threads[i], work, &workers[i]) == thrd_success);
    }
    for (int32_t i = 0; i < 200; i++) {  // and somebody who looks and touches meanwhile
        CHECK(tsg_expert_prefetch(rig.pager, i % 2, i % 8) == TSG_OK);
        CHECK(tsg_expert_evict(rig.pager, (i + 1) % 2, i % 8) == TSG_OK);
        CHECK(tsg_pager_set_policy(rig.pager, (enum tsg_policy) (i % 5)) == TSG_OK);
        CHECK(tsg_pager_check_integrity(rig.pager) == TSG_OK);
    }
    for (int i = 0; i < 2; i++) {
        CHECK(thrd_join(threads[i], NULL) == thrd_success);
    }
    rig_check_slots(&rig);
    ggml_backend_free(second);
    rig_close(&rig);
}

static void policies_change_while_running(void) {
    struct rig rig = rig_open(&small);
    for (uint64_t i = 0; i < 30; i++) {
        CHECK(tsg_pager_set_policy(rig.pager, (enum tsg_policy) (i % 5)) == TSG_OK);
        rig_compare_random(&rig, rig.paged.backend, 1 + (int32_t) (i % 3), 1 + i);
    }
    rig_close(&rig);
}

int main(int argc, char ** argv) {
    const struct test tests[] = {
        TEST(bits_of_f32),
        TEST(bits_of_q8_0_with_biases_and_scales),
        TEST(bits_of_a_fused_weight_in_two_pools),
        TEST(bits_of_layers_of_unequal_size),
        TEST(an_adapter_keeps_its_weights_and_expert_ids),
        TEST(ids_from_argsort_and_in_packed_rows),
        TEST(many_experts_in_one_step),
        TEST(fewer_tokens_in_the_last_layer),
        TEST(the_same_graph_again_and_again),
        TEST(two_threads_in_the_inner_backend),
        TEST(counters_of_decode),
        TEST(from_slots_to_the_stage),
        TEST(a_long_prompt_of_few_experts_fills_the_cache),
        TEST(a_long_prompt_spares_the_working_set),
        TEST(a_pool_of_everything),
        TEST(memory_nobody_filled_is_zero),
        TEST(a_router_that_chooses_no_expert),
        TEST(a_view_of_an_expert_weight),
        TEST(more_experts_a_token_than_planned),
        TEST(two_backends_take_turns),
        TEST(two_threads_with_a_backend_each),
        TEST(policies_change_while_running),
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
