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

// ---- patches of a graph ----

// ggml-cuda fuses a matmul with its scale, bias and activation only if all of them use one ids tensor. No bit on the CPU tells, so look at the nodes.
static void what_is_per_expert_shares_the_slot_ids(void) {
    struct spec spec = small;
    spec.tables      = true;
    spec.adapter     = true;
    struct rig            rig     = rig_open(&spec);
    struct batch *        batch   = batch_random(&spec, 3, 1);
    struct graph          g       = graph_build(&rig, &rig.paged, batch);
    const struct tsg_pool * pool  = &rig.pager->pools[0];
    struct tsg_graph      patches = { 0 };
    struct ggml_tensor    slot_ids = { 0 }, scratch = { 0 };
    struct ggml_tensor *  repeats[TSG_MAX_PARTS] = { &scratch, &scratch, &scratch, &scratch };
    CHECK(tsg_graph_scan(&patches, rig.pager, g.graph) && patches.n_steps == 2);
    CHECK(patches.steps[0].end == patches.steps[1].first && patches.steps[1].end == g.graph->n_nodes);
    CHECK(g.graph->nodes[patches.steps[1].first]->op == GGML_OP_MUL_MAT_ID && patches.steps[1].layer == rig.pager->layers[1]);
    CHECK(tsg_graph_use_slots(&patches, g.graph, &patches.steps[1], pool, &slot_ids, repeats));
    int n_slots = 0, n_experts = 0;
    for (int i = 0; i < g.graph->n_nodes; i++) {
        const struct ggml_tensor * node = g.graph->nodes[i];
        const struct ggml_tensor * ids  = node->op == GGML_OP_GET_ROWS ? node->src[1] : node->src[2];
        const bool by_id = node->op == GGML_OP_GET_ROWS || node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_ADD_ID;
        n_slots   += by_id && ids == &slot_ids;
        n_experts += by_id && (ids == patches.steps[0].ids || ids == patches.steps[1].ids);
        for (int p = 0; p < 3 && by_id && ids == &slot_ids; p++) {
            const bool own = node->src[0] == pool->slot[p] || node->src[1] == pool->bias[p] ||
                             (node->op == GGML_OP_GET_ROWS && node->src[0]->src[0]->src[0] == pool->scale[p]);
            n_slots += 100 * own;
        }
    }
    CHECK(n_slots == 909);         // three matmuls, biases, scales, each with a table of slots
    CHECK(n_experts == 9 + 3 + 3); // the other layer's; in each layer the adapter's two matmuls and the router's probabilities
    tsg_graph_restore(&patches);
    tsg_graph_free(&patches);
    graph_free(&g);
    free(batch);
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

static int n_waits;

static void count_wait(ggml_backend_t backend) {
    (void) backend;
    n_waits++;
}

// What the first has issued may still read slots. The CPU computes at once, so the wait itself is counted.
static void a_second_backend_waits_for_the_first(void) {
    struct rig     rig    = rig_open(&small);
    ggml_backend_t first  = rig.paged.backend;
    ggml_backend_t second = rig_backend(&rig);
    rig_compare_random(&rig, first, 2, 1);
    ((ggml_backend_t *) first->context)[0]->iface.synchronize = count_wait;  // of the inner backend
    n_waits = 0;
    rig_compare_random(&rig, second, 2, 2);
    CHECK(n_waits == 1);
    rig_compare_random(&rig, second, 2, 3);
    CHECK(n_waits == 1);
    ggml_backend_free(second);
    rig_close(&rig);
}

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

// The last part of a layer is told from the others by what the graph reads, also through tables and adapters.
static void where_the_last_part_begins(void) {
    for (int i = 0; i < 8; i++) {
        struct spec spec     = small;
        spec.tables          = i & 1;
        spec.fused           = i & 2;
        spec.adapter         = i & 4;
        struct rig       rig   = rig_open(&spec);
        struct batch *   batch = batch_random(&spec, 2, 1);
        struct graph     graph = graph_build(&rig, &rig.paged, batch);
        struct tsg_graph steps = { 0 };
        CHECK(tsg_graph_scan(&steps, rig.pager, graph.graph) && steps.n_steps == 2);
        for (int l = 0; l < 2; l++) {
            const struct tsg_step * step = &steps.steps[l];
            const int               last = step->down, end = step->done;
            const int32_t           down = rig_n_parts(&spec) - 1;
            CHECK(graph.graph->nodes[last]->op == GGML_OP_MUL_MAT_ID && graph.graph->nodes[last]->src[0] == rig.paged.weight[l][down]);
            CHECK(step->first < last && last < end && end <= step->end);
            for (int n = step->first; n < step->end; n++) {
                const struct ggml_tensor * node = graph.graph->nodes[n];
                for (int32_t p = 0; p < down; p++) {
                    CHECK(n < last || (node->src[0] != rig.paged.weight[l][p] && (!spec.tables || node->src[1] != rig.paged.bias[l][p])));
                }
                CHECK(n >= last || node->op != GGML_OP_ADD_ID || !spec.tables || node->src[1] != rig.paged.bias[l][down]);
                CHECK(n < end || node->op != GGML_OP_MUL_MAT_ID);
            }
        }
        tsg_graph_free(&steps);
        graph_free(&graph);
        free(batch);
        rig_close(&rig);
    }
}

static uint64_t time_of(struct rig * rig, int32_t layer, enum tsg_stretch stretch, uint64_t graphs) {
    struct tsg_layer_time time;
    CHECK(tsg_pager_layer_time(rig->pager, layer, &time) == TSG_OK && time.graphs == graphs);
    return time.ns[stretch];
}

static void taking_times(void) {
    struct spec spec = small;
    spec.n_slots     = 3;
    spec.tables      = true;
    struct rig            rig = rig_open(&spec);
    struct tsg_layer_time time;
    CHECK(rig_failed(tsg_pager_layer_time(rig.pager, 0, &time), TSG_E_ARGUMENT, "no times are taken"));
    CHECK(tsg_pager_set_profile(rig.pager, true) == TSG_OK);
    CHECK(rig_failed(tsg_pager_layer_time(rig.pager, 3, &time), TSG_E_ARGUMENT, "there is no layer 3"));
    CHECK(rig_failed(tsg_pager_layer_time(rig.pager, -1, &time), TSG_E_ARGUMENT, "there is no layer -1"));
    for (uint64_t i = 0; i < 10; i++) {
        rig_compare_random(&rig, rig.paged.backend, 1 + (int32_t) (i % 2), 1 + i);
    }
    rig_compare_random(&rig, rig.paged.backend, 50, 100);  // prefill: not timed
    for (int32_t l = 0; l < 2; l++) {
        CHECK(time_of(&rig, l, TSG_ATTENTION, 10) > 0 && time_of(&rig, l, TSG_EXPERTS, 10) > 0 && time_of(&rig, l, TSG_LOOKUP, 10) > 0);
        CHECK(time_of(&rig, l, TSG_COPY, 10) > 0);
    }
    CHECK(time_of(&rig, 2, TSG_ATTENTION, 10) > 0 && time_of(&rig, 2, TSG_COPY, 10) == 0);
    CHECK(tsg_pager_set_profile(rig.pager, true) == TSG_OK && time_of(&rig, 0, TSG_EXPERTS, 0) == 0);  // from zero
    CHECK(tsg_pager_set_profile(rig.pager, false) == TSG_OK);
    rig_compare_random(&rig, rig.paged.backend, 1, 3);
    CHECK(rig_failed(tsg_pager_layer_time(rig.pager, 0, &time), TSG_E_ARGUMENT, "no times are taken"));
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
        TEST(what_is_per_expert_shares_the_slot_ids),
        TEST(a_router_that_chooses_no_expert),
        TEST(a_view_of_an_expert_weight),
        TEST(more_experts_a_token_than_planned),
        TEST(a_second_backend_waits_for_the_first),
        TEST(two_backends_take_turns),
        TEST(two_threads_with_a_backend_each),
        TEST(policies_change_while_running),
        TEST(where_the_last_part_begins),
        TEST(taking_times),
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
