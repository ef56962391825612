// test_coexec.c - misses computed by the CPU beside the device: the bits of the plain CPU backend for every split, admission by counts, and what goes wrong.
#include "rig.h"

#include "engine.h"

#include <time.h>

static const struct spec small = { .type = GGML_TYPE_Q8_0, .tables = true, .n_layers = 2, .n_expert = { 8, 8 }, .n_used = 3, .n_slots = 6 };

static const struct tsg_miss cpu_only   = { .mode = TSG_MISS_CPU };
static const struct tsg_miss cpu_admits = { .mode = TSG_MISS_CPU, .every = 2 };
static const struct tsg_miss fetch      = { .mode = TSG_MISS_FETCH };

// A rig whose CPU computes misses with one thread.
static struct rig open_with_cpu(const struct spec * spec, const struct tsg_miss * miss) {
    struct rig rig = rig_new(spec);
    CHECK(tsg_pager_use_cpu(rig.pager, rig.cpu, 1) == TSG_OK);
    rig_load(&rig);
    CHECK(tsg_pager_set_miss(rig.pager, miss) == TSG_OK);
    return rig;
}

static struct tsg_counts decode_counts(struct rig * rig) {
    return rig_stats(rig).phase[TSG_DECODE];
}

static void compare_decode(struct rig * rig, uint64_t n, uint64_t seed) {
    for (uint64_t i = 0; i < n; i++) {
        rig_compare_random(rig, rig->paged.backend, 1 + (int32_t) (i % TSG_DECODE_TOKENS), seed + i);
    }
}

// ---- bits ----

// From all misses on the CPU to all but none: the CPU is taken to be `ratio` times as fast as the link.
static void compare_splits(const struct spec * spec) {
    const double ratios[] = { 100, 3, 1, 0.3, 0.01 };
    uint64_t     rows     = UINT64_MAX;
    for (size_t i = 0; i < sizeof(ratios) / sizeof(ratios[0]); i++) {
        const struct tsg_miss split = { .mode = TSG_MISS_SPLIT, .every = 4, .link_rate = 1e9, .cpu_rate = 1e9 * ratios[i] };
        struct rig            rig   = open_with_cpu(spec, &split);
        compare_decode(&rig, 24, 1);
        CHECK(decode_counts(&rig).cpu_rows < rows && decode_counts(&rig).misses > 0);
        rows = decode_counts(&rig).cpu_rows;
        rig_close(&rig);
    }
    struct rig rig = open_with_cpu(spec, &cpu_admits);
    compare_decode(&rig, 24, 1);
    CHECK(decode_counts(&rig).cpu_rows >= decode_counts(&rig).misses && decode_counts(&rig).admitted > 0);
    rig_close(&rig);
}

static void bits_with_biases_and_scales(void) {
    compare_splits(&small);
}

static void bits_of_a_fused_weight_in_two_pools(void) {
    compare_splits(&(struct spec) { .type = GGML_TYPE_Q4_0, .fused = true, .pools = true, .n_layers = 4, .n_expert = { 8, 8, 8, 8 }, .n_used = 3,
                                    .n_slots = 4 });
}

static void bits_of_layers_of_unequal_size(void) {
    compare_splits(&(struct spec) { .type = GGML_TYPE_F32, .tables = true, .n_layers = 3, .n_expert = { 8, 5, 12 }, .n_used = 2, .n_slots = 7 });
}

static void bits_of_clamps_views_and_nodes_in_place(void) {
    for (int fused = 0; fused < 2; fused++) {
        struct spec spec = small;
        spec.loose       = true;
        spec.fused       = fused;
        compare_splits(&spec);
    }
}

static void bits_with_more_experts_in_a_step_than_slots(void) {
    struct spec spec = small;
    spec.n_slots     = spec.n_used;
    struct rig  rig  = open_with_cpu(&spec, &cpu_admits);
    compare_decode(&rig, 32, 5);
    CHECK(decode_counts(&rig).streamed == 0);
    rig_close(&rig);
}

static void longer_batches_do_as_before(void) {
    struct rig rig = open_with_cpu(&small, &cpu_only);
    for (int32_t n_tokens = TSG_DECODE_TOKENS + 1; n_tokens < 60; n_tokens += 20) {
        rig_compare_random(&rig, rig.paged.backend, n_tokens, (uint64_t) n_tokens);
        compare_decode(&rig, 4, (uint64_t) n_tokens);
    }
    const struct tsg_stats stats = rig_stats(&rig);
    CHECK(stats.phase[TSG_PREFILL].cpu_rows == 0 && stats.phase[TSG_PREFILL].bytes_link > 0 && stats.phase[TSG_DECODE].cpu_rows > 0);
    rig_close(&rig);
}

static void the_way_changes_while_running(void) {
    const struct tsg_miss split = { .mode = TSG_MISS_SPLIT, .link_rate = 1e9, .cpu_rate = 1e9 };
    const struct tsg_miss ways[] = { cpu_only, fetch, cpu_admits, split };
    struct rig            rig    = open_with_cpu(&small, &fetch);
    for (uint64_t i = 0; i < 40; i++) {
        CHECK(tsg_pager_set_miss(rig.pager, &ways[i % 4]) == TSG_OK);
        compare_decode(&rig, 3, 1 + i);
    }
    rig_close(&rig);
}

static void two_backends_take_turns(void) {
    struct rig     rig  = open_with_cpu(&small, &cpu_admits);
    ggml_backend_t more = rig_backend(&rig);
    for (uint64_t i = 0; i < 20; i++) {
        rig_compare_random(&rig, i % 2 ? more : rig.paged.backend, 1 + (int32_t) (i % 3), 1 + i);
    }
    ggml_backend_free(more);
    rig_close(&rig);
}

static void the_cpu_measures_its_own_speed(void) {
    const struct tsg_miss split = { .mode = TSG_MISS_SPLIT, .link_rate = 1e9 };
    struct rig            rig   = open_with_cpu(&small, &split);
    CHECK(strstr(tsg_pager_miss(rig.pager), "until its speed is known"));
    compare_decode(&rig, 80, 1);
    CHECK(strstr(tsg_pager_miss(rig.pager), "split between the link (1.0 GB/s) and the CPU"));
    CHECK(rig_stats(&rig).notes.cpu_ns > 0);
    rig_close(&rig);
}

// ---- admission ----

static void without_admission_nothing_moves(void) {
    struct rig rig = open_with_cpu(&small, &cpu_only);
    compare_decode(&rig, 24, 1);
    const struct tsg_counts c = decode_counts(&rig);
    CHECK(c.lookups > 0 && c.misses == c.lookups && c.bytes_link == 0 && c.admitted == 0);
    rig_close(&rig);
}

// One token that wants what it is told to: misses are known in advance.
static void who_is_wanted_more_enters(void) {
    struct tsg_miss miss = { .mode = TSG_MISS_CPU, .every = 1 };
    struct spec     spec = small;
    spec.n_layers        = 1;
    spec.n_used          = 2;
    spec.n_slots         = 2;
    struct rig     rig = open_with_cpu(&spec, &miss);
    struct batch * a   = batch_random(&spec, 1, 1), * b = batch_random(&spec, 1, 1);
    for (int32_t i = 0; i < 8; i++) {
        a->order[0][i] = i;
        b->order[0][i] = (i + 4) % 8;
    }
    rig_compare(&rig, a);  // 0 and 1 take the free slots
    CHECK(decode_counts(&rig).admitted == 2 && decode_counts(&rig).evictions == 0);
    rig_compare(&rig, a);
    CHECK(decode_counts(&rig).hits == 2);
    rig_compare(&rig, b);  // 4 and 5: once against twice
    CHECK(decode_counts(&rig).admitted == 2 && decode_counts(&rig).misses == 4);
    rig_compare(&rig, b);  // twice, and more recently
    CHECK(decode_counts(&rig).admitted == 4 && decode_counts(&rig).evictions == 2 && decode_counts(&rig).misses == 6);
    rig_compare(&rig, b);
    CHECK(decode_counts(&rig).hits == 4 && decode_counts(&rig).misses == 6);
    free(a);
    free(b);
    rig_close(&rig);
}

static void at_most_one_in_so_many_enters(void) {
    uint64_t before = UINT64_MAX;
    for (int32_t every = 1; every <= 16; every *= 4) {
        struct tsg_miss miss = { .mode = TSG_MISS_CPU, .every = every };
        struct spec     spec = small;
        spec.n_slots         = 4;
        struct rig rig       = open_with_cpu(&spec, &miss);
        compare_decode(&rig, 32, 3);
        const struct tsg_counts c = decode_counts(&rig);
        CHECK(c.admitted > 0 && c.admitted <= before && c.admitted * (uint64_t) every <= c.misses);
        CHECK(c.bytes_link == c.admitted * tsg_layer_expert_bytes(rig.pager->layers[0]));
        before = c.admitted;
        rig_close(&rig);
    }
}

static void pinned_experts_stay(void) {
    struct tsg_miss miss = { .mode = TSG_MISS_CPU, .every = 1 };
    struct rig      rig  = open_with_cpu(&small, &miss);
    for (int32_t e = 0; e < 3; e++) {
        CHECK(tsg_expert_pin(rig.pager, rig.layer[1], e, true) == TSG_OK);
    }
    compare_decode(&rig, 40, 9);
    for (int32_t e = 0; e < 3; e++) {
        struct tsg_expert expert;
        CHECK(tsg_expert_get(rig.pager, rig.layer[1], e, &expert) == TSG_OK && expert.pinned && expert.slot >= 0);
    }
    rig_close(&rig);
}

static void a_run_repeats(void) {
    struct tsg_counts first = { 0 };
    for (int run = 0; run < 2; run++) {
        struct rig rig = open_with_cpu(&small, &cpu_admits);
        compare_decode(&rig, 40, 11);
        const struct tsg_counts c = decode_counts(&rig);
        CHECK(run == 0 || memcmp(&c, &first, sizeof(c)) == 0);
        first = c;
        rig_close(&rig);
    }
}

// ---- whole layers ----

static const struct tsg_miss layers = { .mode = TSG_MISS_LAYERS };

// Which layers lie whole in slots, and which one decode computes from the prefill stage, as digits: 0 neither, 1 whole, 2 stage.
static int placement(const struct rig * rig) {
    int digits = 0;
    for (int32_t i = 0; i < rig->spec.n_layers; i++) {
        const struct tsg_layer * layer = rig->pager->layers[i];
        digits = 10 * digits + (layer->whole ? 1 : layer->stage >= 0 ? 2 : 0);
    }
    return digits;
}

static void whole_layers_are_the_last_that_fit(void) {
    const int expected[] = { 2, 21, 21, 211, 211 };  // of 3 layers of 8: no slot left over, some, ...
    for (int64_t n_slots = 4; n_slots <= 20; n_slots += 4) {
        struct spec spec = small;
        spec.n_layers    = 3;
        spec.n_expert[2] = 8;
        spec.n_slots     = n_slots;
        struct rig rig   = open_with_cpu(&spec, &layers);
        CHECK(placement(&rig) == expected[n_slots / 4 - 1]);
        compare_decode(&rig, 24, 1);
        const struct tsg_counts c = decode_counts(&rig);
        CHECK(c.admitted == 0 && (c.cpu_rows > 0) == (placement(&rig) < 211));
        CHECK(c.cpu_rows == 0 || c.misses > 0);
        rig_close(&rig);
    }
}

static void whole_layers_in_two_pools_of_unequal_layers(void) {
    const struct spec spec = { .type = GGML_TYPE_Q8_0, .tables = true, .pools = true, .n_layers = 4, .n_expert = { 8, 5, 6, 12 }, .n_used = 2,
                               .n_slots = 13 };
    struct rig rig = open_with_cpu(&spec, &(struct tsg_miss) { .mode = TSG_MISS_LAYERS, .every = 1 });
    CHECK(placement(&rig) == 2211);  // slots are left over in both pools
    compare_decode(&rig, 24, 1);
    CHECK(decode_counts(&rig).admitted == 0);  // the stages have what is left
    rig_close(&rig);
}

static void slots_left_over_are_a_cache(void) {
    struct spec spec = small;
    spec.n_layers    = 3;
    spec.n_expert[2] = 8;
    spec.n_slots     = 12;
    struct rig rig   = open_with_cpu(&spec, &(struct tsg_miss) { .mode = TSG_MISS_LAYERS, .every = 1 });
    compare_decode(&rig, 40, 1);
    const struct tsg_counts c = decode_counts(&rig);
    CHECK(placement(&rig) == 21 && c.admitted > 0 && c.cpu_rows > 0);
    rig_check_slots(&rig);
    rig_close(&rig);
}

// A prompt through the stage takes it from the layer that decode computes there, and the next token brings that back.
static void prompts_between_tokens_of_whole_layers(void) {
    struct rig rig = open_with_cpu(&small, &layers);
    CHECK(placement(&rig) == 2);  // 6 slots for layers of 8
    const struct tsg_pool * pool = &rig.pager->pools[0];
    for (uint64_t i = 0; i < 6; i++) {
        compare_decode(&rig, 4, 1 + i);
        CHECK(pool->held[0] == rig.pager->layers[1]);
        const uint64_t bytes = decode_counts(&rig).bytes_link;
        compare_decode(&rig, 4, 100 + i);
        CHECK(decode_counts(&rig).bytes_link == bytes);
        rig_compare_random(&rig, rig.paged.backend, 40, i);
        CHECK(pool->held[0] == NULL);
    }
    rig_close(&rig);
}

// On a GPU eight tokens of MXFP4 go neither through slots nor to the CPU: a layer takes the stage within the graph whose next layer is computed from it.
static void a_stage_is_used_twice_in_a_graph(void) {
    struct spec spec = small;
    spec.type        = GGML_TYPE_MXFP4;
    struct rig rig   = open_with_cpu(&spec, &layers);
    CHECK(placement(&rig) == 2);
    rig.pager->inner_is_cpu = false;
    for (uint64_t i = 0; i < 12; i++) {
        rig_compare_random(&rig, rig.paged.backend, i % 2 ? 8 : 1 + (int32_t) (i % 5), 1 + i);
    }
    CHECK(decode_counts(&rig).streamed > 0 && decode_counts(&rig).cpu_rows > 0);
    rig_close(&rig);
}

static void whole_layers_come_and_go(void) {
    const struct tsg_miss ways[] = { cpu_only, layers, fetch, layers, cpu_admits };
    struct spec           spec   = small;
    spec.n_slots                 = 10;
    struct rig rig = open_with_cpu(&spec, &fetch);
    for (uint64_t i = 0; i < 40; i++) {
        CHECK(tsg_pager_set_miss(rig.pager, &ways[i % 5]) == TSG_OK);
        CHECK(placement(&rig) == (ways[i % 5].mode == TSG_MISS_LAYERS ? 21 : 0));
        rig_check_slots(&rig);
        compare_decode(&rig, 3, 1 + i);
        rig_compare_random(&rig, rig.paged.backend, i % 2 ? 20 : 60, i);
    }
    rig_close(&rig);
}

static void two_backends_share_whole_layers(void) {
    struct spec spec = small;
    spec.n_slots     = 10;
    struct rig     rig  = open_with_cpu(&spec, &layers);
    ggml_backend_t more = rig_backend(&rig);
    for (uint64_t i = 0; i < 20; i++) {
        rig_compare_random(&rig, i % 2 ? more : rig.paged.backend, i % 3 ? 1 + (int32_t) (i % 3) : 50, 1 + i);
    }
    ggml_backend_free(more);
    rig_close(&rig);
}

static void whole_layers_and_experts_by_hand(void) {
    struct spec spec = small;
    spec.n_slots     = 10;
    struct rig rig   = open_with_cpu(&spec, &fetch);
    for (int32_t e = 0; e < 3; e++) {
        CHECK(tsg_expert_pin(rig.pager, rig.layer[0], e, true) == TSG_OK);
    }
    CHECK(tsg_pager_set_miss(rig.pager, &layers) == TSG_OK);
    CHECK(placement(&rig) == 2);  // with three pinned there is no room for a layer
    compare_decode(&rig, 8, 1);
    CHECK(tsg_pager_set_miss(rig.pager, &fetch) == TSG_OK && tsg_expert_pin(rig.pager, rig.layer[0], 2, false) == TSG_OK);
    CHECK(tsg_pager_set_miss(rig.pager, &layers) == TSG_OK);
    CHECK(placement(&rig) == 21);
    for (int32_t e = 0; e < 2; e++) {
        struct tsg_expert expert;
        CHECK(tsg_expert_get(rig.pager, rig.layer[0], e, &expert) == TSG_OK && expert.pinned && expert.slot >= 0 && expert.slot < 2);
    }
    rig_check_slots(&rig);
    compare_decode(&rig, 8, 1);
    CHECK(rig_failed(tsg_expert_evict(rig.pager, rig.layer[1], 0), TSG_E_STATE, "stays in the slots as a whole"));
    CHECK(rig_failed(tsg_expert_prefetch(rig.pager, rig.layer[0], 5), TSG_E_STATE, "the slots hold whole layers"));
    CHECK(tsg_pager_check_integrity(rig.pager) == TSG_OK);
    rig_close(&rig);
}

static void an_adapter_means_no_whole_layers(void) {
    struct spec spec = small;
    spec.adapter     = true;
    spec.n_slots     = 10;
    struct rig rig   = open_with_cpu(&spec, &layers);
    CHECK(placement(&rig) == 21);
    compare_decode(&rig, 16, 1);
    CHECK(placement(&rig) == (rig.pager->coexec.cannot ? 0 : 21));
    rig_close(&rig);
}

static void the_cpu_is_timed_without_computing_misses(void) {
    struct rig rig = rig_new(&small);
    CHECK(tsg_pager_cpu_seconds(rig.pager, rig.cpu, 1) == 0);
    rig_load(&rig);
    const double seconds = tsg_pager_cpu_seconds(rig.pager, rig.cpu, 2);
    CHECK(seconds > 0 && seconds < 1);
    CHECK(tsg_pager_cpu_seconds(rig.pager, rig.cpu, 0) == 0);
    rig_close(&rig);
}

// ---- copies in the background, as on CUDA ----

// A driver whose copies are over when the test says so: until then nothing of them is in the slot.
struct copy {
    void *       to;
    const void * from;
    size_t       size;
};

static struct copy copies[1024];
static int         n_copies;
static bool        arrived;

static void let_arrive(void) {
    for (int i = 0; i < n_copies; i++) {
        memcpy(copies[i].to, copies[i].from, copies[i].size);
    }
    n_copies = 0;
    arrived  = true;
}

static tsg_cu_result fake_context_set(void * context) {
    (void) context;
    return 0;
}

static tsg_cu_result fake_copy(tsg_cu_ptr to, const void * from, size_t size, tsg_cu_stream stream) {
    (void) stream;
    CHECK(n_copies < 1024);
    copies[n_copies++] = (struct copy) { (void *) to, from, size };
    memset((void *) to, 0xff, size);  // NaN in every type: whoever reads the slot now gives no bits of anything
    return 0;
}

static tsg_cu_result fake_record(tsg_cu_event event, tsg_cu_stream stream) {
    (void) event, (void) stream;
    return 0;
}

static uint64_t n_delays, delayed_ns;  // of a link that is slowed down

static tsg_cu_result fake_launch(tsg_cu_func function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                 tsg_cu_stream stream, void ** params, void ** extra) {
    (void) function, (void) stream, (void) extra;
    CHECK(gx * gy * gz * bx * by * bz == 1 && shared == 0);
    n_delays++;
    delayed_ns += *(uint64_t *) params[1];
    return 0;
}

static tsg_cu_result fake_query(tsg_cu_event event) {
    (void) event;
    return arrived ? 0 : 600;
}

static void fake_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    (void) dev, (void) event;
    let_arrive();
}

static void fake_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    (void) backend, (void) event;
    const bool before = arrived;
    let_arrive();  // the stream keeps the order; nobody has asked yet
    arrived = before;
}

// A rig whose device copies through that driver, over a link of 1 GB/s.
struct fake {
    struct rig                 rig;
    struct tsg_cuda            cuda;
    struct tsg_dev_counts *    page[1];
    struct tsg_resident        resident;
    struct ggml_backend_device dev;
    struct ggml_backend_event  event;
};

static struct fake * open_fake(const struct spec * spec, const struct tsg_miss * miss) {
    struct fake * f = calloc(1, sizeof(struct fake));
    *f = (struct fake) {
        .rig      = open_with_cpu(spec, miss),
        .cuda     = { .context_set = fake_context_set, .copy_to_device_async = fake_copy, .event_record = fake_record, .event_query = fake_query,
                      .launch = fake_launch },
        .resident = { .cuda = &f->cuda, .page = f->page, .ps_per_byte = 1000 },
        .dev      = { .iface = { .event_synchronize = fake_synchronize } },
        .event    = { .device = &f->dev },
    };
    struct {
        ggml_backend_t      inner;
        struct tsg_engine * engine;
    } * backend = f->rig.paged.backend->context;
    backend->inner->iface.event_wait            = fake_wait;
    backend->engine->event[TSG_EV_LAUNCH_OUT]   = &f->event;
    for (int32_t i = 0; i < TSG_MAX_PENDING; i++) {
        f->rig.pager->coexec.pending[i].done = &f->event;
    }
    f->rig.pager->resident = &f->resident;
    return f;
}

static void close_fake(struct fake * f) {
    f->rig.pager->resident = NULL;
    for (int32_t i = 0; i < TSG_MAX_PENDING; i++) {
        f->rig.pager->coexec.pending[i].done = NULL;
    }
    rig_close(&f->rig);
    free(f);
}

// The same batch on both sides, without looking at slots by hand, which would wait for the copies.
static void compare_while_copying(struct rig * rig, const struct batch * batch) {
    struct graph plain = graph_build(rig, &rig->plain, batch), paged = graph_build(rig, &rig->paged, batch);
    CHECK(ggml_backend_graph_compute(rig->plain.backend, plain.graph) == GGML_STATUS_SUCCESS);
    CHECK(ggml_backend_graph_compute(rig->paged.backend, paged.graph) == GGML_STATUS_SUCCESS);
    CHECK(graph_same_output(&plain, &paged) && tsg_slots_check(&rig->pager->pools[0].slots) == NULL);
    graph_free(&plain);
    graph_free(&paged);
}

static void compare_with_slow_copies(struct fake * f) {
    struct rig *              rig = &f->rig;
    const struct tsg_coexec * x   = &rig->pager->coexec;
    for (uint64_t i = 0; i < 60; i++) {
        arrived = false;
        struct batch * batch = batch_random(&small, 1 + (int32_t) (i % 3), 1 + i);
        for (int again = 0; again < 3; again++) {  // nothing arrives: computed by the CPU all the same, and no slot is taken twice
            compare_while_copying(rig, batch);
        }
        const struct tsg_counts c = decode_counts(rig);
        CHECK(c.hits + c.misses == c.lookups && (i > 0 || (c.admitted > 0 && x->n_pending == (int32_t) c.admitted)));
        if (i % 2) {
            let_arrive();  // seen by the next graph
        } else {
            rig_check_slots(rig);  // by hand: waits for them
            CHECK(x->n_pending == 0);
        }
        free(batch);
    }
    const struct tsg_counts c = decode_counts(rig);
    CHECK(c.hits > 0 && c.cpu_rows > 0 && delayed_ns == c.bytes_link);
    rig_compare_random(rig, rig->paged.backend, 40, 1);  // so does a long prompt
    CHECK(x->n_pending == 0);
}

static void copies_on_their_way_are_misses_until_they_arrive(void) {
    struct fake * f = open_fake(&small, &(struct tsg_miss) { .mode = TSG_MISS_CPU, .every = 1 });
    compare_with_slow_copies(f);
    CHECK(n_delays == 2 * decode_counts(&f->rig).admitted);
    close_fake(f);
}

// On a GPU seven tokens of MXFP4 go through slots, eight do not: these fetch, in between.
static void a_step_that_cannot_share_waits_for_copies(void) {
    struct spec spec = small;
    spec.type        = GGML_TYPE_MXFP4;
    struct fake * f  = open_fake(&spec, &(struct tsg_miss) { .mode = TSG_MISS_CPU, .every = 1 });
    f->rig.pager->inner_is_cpu = false;
    for (uint64_t i = 0; i < 20; i++) {
        arrived = false;
        for (int32_t n_tokens = 1; n_tokens <= 8; n_tokens += 7) {
            struct batch * batch = batch_random(&spec, n_tokens, 1 + i);
            compare_while_copying(&f->rig, batch);
            free(batch);
        }
    }
    CHECK(decode_counts(&f->rig).streamed > 0 && decode_counts(&f->rig).admitted > 0);
    close_fake(f);
}

static void copies_on_their_way_are_not_fetched_as_well(void) {
    struct fake * f = open_fake(&small, &(struct tsg_miss) { .mode = TSG_MISS_SPLIT, .every = 1, .link_rate = 1e9, .cpu_rate = 1e9 });
    compare_with_slow_copies(f);
    CHECK(n_delays > 2 * decode_counts(&f->rig).admitted);
    close_fake(f);
}

// ---- what is said ----

static atomic_bool reading;

// 0: every line was one of the two that are set in turn.
static int read_lines(void * pager) {
    int wrong = 0;
    while (reading) {
        const char * text = tsg_pager_miss(pager);
        wrong += strcmp(text, "computed by the CPU with 1 thread, at most one in 2 enters the pool") != 0 && strcmp(text, "fetched") != 0;
    }
    return wrong;
}

static void lines_are_whole_while_they_change(void) {
    struct rig rig = open_with_cpu(&small, &cpu_admits);
    thrd_t     reader;
    int        wrong;
    reading = true;
    CHECK(thrd_create(&reader, read_lines, rig.pager) == thrd_success);
    for (int i = 0; i < 50000; i++) {
        CHECK(tsg_pager_set_miss(rig.pager, i % 2 ? &cpu_admits : &fetch) == TSG_OK);
    }
    reading = false;
    CHECK(thrd_join(reader, &wrong) == thrd_success && wrong == 0);
    rig_close(&rig);
}

// ---- what cannot be ----

static void an_adapter_means_fetching_said_once(void) {
    struct spec spec = small;
    spec.adapter     = true;
    struct rig rig   = open_with_cpu(&spec, &cpu_admits);
    compare_decode(&rig, 16, 1);
    CHECK(decode_counts(&rig).cpu_rows == 0 && decode_counts(&rig).misses > 0);
    CHECK(strstr(tsg_pager_miss(rig.pager), "fetched: ") && strstr(tsg_pager_miss(rig.pager), "cannot be computed row by row"));
    rig_close(&rig);
}

static void nothing_is_missed_when_all_is_resident(void) {
    struct spec spec = small;
    spec.n_slots     = 16;
    struct rig rig   = open_with_cpu(&spec, &cpu_admits);
    compare_decode(&rig, 8, 1);
    CHECK(decode_counts(&rig).cpu_rows == 0 && strstr(tsg_pager_miss(rig.pager), "none"));
    rig_close(&rig);
}

static void what_is_refused(void) {
    struct rig rig = rig_new(&small);
    CHECK(rig_failed(tsg_pager_set_miss(rig.pager, &cpu_only), TSG_E_STATE, "not loaded"));
    CHECK(rig_failed(tsg_pager_use_cpu(rig.pager, rig.cpu, 0), TSG_E_ARGUMENT, "threads"));
    CHECK(rig_failed(tsg_pager_use_cpu(rig.pager, rig.cpu, 100000), TSG_E_ARGUMENT, "threads"));
    CHECK(rig_failed(tsg_pager_use_cpu(rig.pager, tsg_pager_device(rig.pager), 1), TSG_E_ARGUMENT, "CPU device"));
    rig_load(&rig);
    CHECK(rig_failed(tsg_pager_use_cpu(rig.pager, rig.cpu, 1), TSG_E_STATE, "before commit"));
    CHECK(rig_failed(tsg_pager_set_miss(rig.pager, &cpu_only), TSG_E_STATE, "without the CPU"));
    CHECK(rig_failed(tsg_pager_set_miss(rig.pager, &(struct tsg_miss) { .mode = TSG_MISS_SPLIT }), TSG_E_ARGUMENT, "no such way"));
    CHECK(rig_failed(tsg_pager_set_miss(rig.pager, &(struct tsg_miss) { .every = -1 }), TSG_E_ARGUMENT, "no such way"));
    CHECK(tsg_pager_set_miss(rig.pager, &fetch) == TSG_OK);
    rig_close(&rig);
}

// ---- faults ----

static enum ggml_status fails(ggml_backend_t backend, struct ggml_cgraph * graph) {
    (void) backend, (void) graph;
    return GGML_STATUS_ALLOC_FAILED;
}

static enum ggml_status at_once(ggml_backend_t backend, struct ggml_cgraph * graph) {
    (void) backend, (void) graph;
    return GGML_STATUS_SUCCESS;
}

static void no_hand_over_is_lost(void) {
    for (int32_t n_threads = 1; n_threads <= GGML_MAX_N_THREADS; n_threads += GGML_MAX_N_THREADS - 1) {  // with a core to spin on, and without
        struct tsg_cpu * cpu = tsg_cpu_new(ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0), n_threads);
        CHECK(cpu && (n_threads == 1 || !cpu->spins));
        cpu->compute = at_once;
        cpu->late_ms = 5000;
        for (int i = 0; i < 50000; i++) {
            tsg_cpu_start(cpu, NULL);
            CHECK(tsg_cpu_wait(cpu));
        }
        tsg_cpu_free(cpu);
    }
}

static void sleep_ms(long ms) {
    nanosleep(&(struct timespec) { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 }, NULL);
}

static enum ggml_status comes_late(ggml_backend_t backend, struct ggml_cgraph * graph) {
    sleep_ms(600);
    return ggml_backend_graph_compute(backend, graph);
}

static enum ggml_status never_comes(ggml_backend_t backend, struct ggml_cgraph * graph) {
    (void) backend, (void) graph;
    sleep_ms(3600 * 1000L);
    return GGML_STATUS_SUCCESS;
}

static enum ggml_status compute_one(struct rig * rig) {
    struct batch *         batch  = batch_random(&rig->spec, 2, 77);
    struct graph           graph  = graph_build(rig, &rig->paged, batch);
    const enum ggml_status status = ggml_backend_graph_compute(rig->paged.backend, graph.graph);
    graph_free(&graph);
    free(batch);
    return status;
}

static void a_cpu_that_fails_is_an_error_and_fetching_goes_on(void) {
    struct rig rig = open_with_cpu(&small, &cpu_admits);
    compare_decode(&rig, 8, 1);
    rig.pager->coexec.cpu->compute = fails;
    CHECK(compute_one(&rig) == GGML_STATUS_FAILED && strstr(tsg_last_error(), "could not compute the misses of a layer"));
    rig.pager->coexec.cpu->compute = ggml_backend_graph_compute;
    compare_decode(&rig, 8, 2);
    rig.pager->coexec.cpu->compute = fails;
    CHECK(tsg_pager_set_miss(rig.pager, &fetch) == TSG_OK);
    compare_decode(&rig, 8, 3);
    rig_close(&rig);
}

static void a_cpu_that_is_late_is_an_error_for_good(void) {
    struct rig rig = open_with_cpu(&small, &cpu_admits);
    rig.pager->coexec.cpu->compute = comes_late;
    rig.pager->coexec.cpu->late_ms = 50;
    CHECK(compute_one(&rig) == GGML_STATUS_FAILED && strstr(tsg_last_error(), "did not finish the misses of a layer within 50 ms"));
    CHECK(compute_one(&rig) == GGML_STATUS_FAILED && strstr(tsg_last_error(), "did not finish the misses of an earlier layer"));
    CHECK(tsg_pager_set_miss(rig.pager, &fetch) == TSG_OK);
    compare_decode(&rig, 8, 1);
    for (int i = 0; tsg_coexec_lost(rig.pager) && i < 300; i++) {  // it comes back: then nothing leaks
        sleep_ms(20);
    }
    CHECK(!tsg_coexec_lost(rig.pager));
    rig_close(&rig);
}

static void a_cpu_that_never_comes_holds_nobody_up(void) {
    struct rig rig = open_with_cpu(&small, &cpu_admits);
    rig.pager->coexec.cpu->compute = never_comes;
    rig.pager->coexec.cpu->late_ms = 20;
    CHECK(compute_one(&rig) == GGML_STATUS_FAILED);
    rig_close(&rig);  // closes, and leaves to the helper what it may still read
    _exit(0);         // which the leak checker would report
}

int main(int argc, char ** argv) {
    const struct test tests[] = {
        TEST(bits_with_biases_and_scales),
        TEST(bits_of_a_fused_weight_in_two_pools),
        TEST(bits_of_layers_of_unequal_size),
        TEST(bits_of_clamps_views_and_nodes_in_place),
        TEST(bits_with_more_experts_in_a_step_than_slots),
        TEST(longer_batches_do_as_before),
        TEST(the_way_changes_while_running),
        TEST(two_backends_take_turns),
        TEST(the_cpu_measures_its_own_speed),
        TEST(without_admission_nothing_moves),
        TEST(whole_layers_are_the_last_that_fit),
        TEST(whole_layers_in_two_pools_of_unequal_layers),
        TEST(slots_left_over_are_a_cache),
        TEST(prompts_between_tokens_of_whole_layers),
        TEST(a_stage_is_used_twice_in_a_graph),
        TEST(whole_layers_come_and_go),
        TEST(two_backends_share_whole_layers),
        TEST(whole_layers_and_experts_by_hand),
        TEST(an_adapter_means_no_whole_layers),
        TEST(the_cpu_is_timed_without_computing_misses),
        TEST(who_is_wanted_more_enters),
        TEST(at_most_one_in_so_many_enters),
        TEST(pinned_experts_stay),
        TEST(a_run_repeats),
        TEST(copies_on_their_way_are_misses_until_they_arrive),
        TEST(copies_on_their_way_are_not_fetched_as_well),
        TEST(a_step_that_cannot_share_waits_for_copies),
        TEST(lines_are_whole_while_they_change),
        TEST(an_adapter_means_fetching_said_once),
        TEST(nothing_is_missed_when_all_is_resident),
        TEST(what_is_refused),
        TEST(no_hand_over_is_lost),
        TEST(a_cpu_that_fails_is_an_error_and_fetching_goes_on),
        TEST(a_cpu_that_is_late_is_an_error_for_good),
        TEST(a_cpu_that_never_comes_holds_nobody_up),
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
