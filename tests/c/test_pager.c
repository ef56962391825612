// test_pager.c - the life of a pager, what it refuses, and the proxy device as llama.cpp sees it.
#include "rig.h"

#include "llama.h"

static const struct spec small = { .type = GGML_TYPE_Q8_0, .tables = true, .n_layers = 2, .n_expert = { 8, 8 }, .n_used = 2, .n_slots = 6 };

static const float zeros[64 * 64];

static const struct tsg_part part_up = { .weight = "up", .type = GGML_TYPE_Q8_0, .ne0 = 32, .ne1 = 8 };

// Some tests ask for more memory than there is.
const char * __asan_default_options(void) {
    return "allocator_may_return_null=1";
}

// ---- planning ----

static void pools_that_cannot_be(void) {
    struct tsg_pager * pager = rig_pager(TSG_POLICY_LFRU);
    int32_t            pool  = -1;
    CHECK(rig_failed(rig_pool(pager, 0, &pool), TSG_E_ARGUMENT, "0"));
    CHECK(rig_failed(rig_pool(pager, -5, &pool), TSG_E_ARGUMENT, "-5"));
    CHECK(rig_failed(rig_pool(pager, INT32_MAX, &pool), TSG_E_ARGUMENT, "slots"));
    CHECK(rig_failed(rig_pool(pager, INT64_MAX, &pool), TSG_E_ARGUMENT, "slots"));
    CHECK(rig_failed(tsg_pager_add_pool(pager, 4, 0, &pool), TSG_E_ARGUMENT, "stages"));
    CHECK(rig_failed(tsg_pager_add_pool(pager, 4, TSG_MAX_STAGES + 1, &pool), TSG_E_ARGUMENT, "stages"));
    CHECK(pool == -1);
    CHECK(rig_pool(pager, 2, &pool) == TSG_OK && pool == 0);
    CHECK(rig_pool(pager, INT32_MAX - 1, &pool) == TSG_OK && pool == 1);
    tsg_pager_free(pager);
}

static void layers_that_cannot_be(void) {
    struct tsg_pager * pager = rig_pager(TSG_POLICY_LFRU);
    struct tsg_part    parts[TSG_MAX_PARTS + 1] = { part_up, part_up, part_up, part_up, part_up };
    int32_t            pool, layer = -1;
    CHECK(rig_failed(tsg_pager_add_layer(pager, 0, 8, 2, parts, 1, &layer), TSG_E_STATE, "pool"));
    CHECK(rig_pool(pager, 4, &pool) == TSG_OK);
    CHECK(rig_failed(tsg_pager_add_layer(pager, 1, 8, 2, parts, 1, &layer), TSG_E_STATE, "pool"));
    CHECK(rig_failed(tsg_pager_add_layer(pager, -1, 8, 2, parts, 1, &layer), TSG_E_STATE, "pool"));
    const int32_t bad[][3] = { { 0, 1, 1 }, { -1, 1, 1 }, { TSG_MAX_EXPERTS + 1, 1, 1 }, { 8, 0, 1 }, { 8, -1, 1 }, { 8, 9, 1 }, { 8, 2, 0 },
                               { 8, 2, TSG_MAX_PARTS + 1 } };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {  // experts, used, weights
        CHECK(rig_failed(tsg_pager_add_layer(pager, pool, bad[i][0], bad[i][1], parts, bad[i][2], &layer), TSG_E_ARGUMENT, "cannot be paged"));
    }
    CHECK(layer == -1);
    CHECK(tsg_pager_add_layer(pager, pool, TSG_MAX_EXPERTS, 1, parts, TSG_MAX_PARTS, &layer) == TSG_OK && layer == 0);
    tsg_pager_free(pager);
}

static void weights_that_cannot_be(void) {
    struct tsg_pager * pager = rig_pager(TSG_POLICY_LFRU);
    char               long_name[GGML_MAX_NAME + 1];
    int32_t            pool, layer = -1;
    memset(long_name, 'x', GGML_MAX_NAME);
    long_name[GGML_MAX_NAME] = 0;
    CHECK(rig_pool(pager, 4, &pool) == TSG_OK);
    const struct tsg_part bad[] = {
        { .weight = NULL, .type = GGML_TYPE_F32, .ne0 = 32, .ne1 = 8 },
        { .weight = long_name, .type = GGML_TYPE_F32, .ne0 = 32, .ne1 = 8 },
        { .weight = "w", .bias = long_name, .bias_data = zeros, .type = GGML_TYPE_F32, .ne0 = 32, .ne1 = 8 },
        { .weight = "w", .scale = long_name, .scale_data = zeros, .type = GGML_TYPE_F32, .ne0 = 32, .ne1 = 8 },
        { .weight = "w", .bias = "b", .type = GGML_TYPE_F32, .ne0 = 32, .ne1 = 8 },
        { .weight = "w", .bias_data = zeros, .type = GGML_TYPE_F32, .ne0 = 32, .ne1 = 8 },
        { .weight = "w", .scale = "s", .type = GGML_TYPE_F32, .ne0 = 32, .ne1 = 8 },
        { .weight = "w", .scale_data = zeros, .type = GGML_TYPE_F32, .ne0 = 32, .ne1 = 8 },
        { .weight = "w", .type = GGML_TYPE_F32, .ne0 = 0, .ne1 = 8 },
        { .weight = "w", .type = GGML_TYPE_F32, .ne0 = 32, .ne1 = -1 },
        { .weight = "w", .type = GGML_TYPE_Q8_0, .ne0 = 33, .ne1 = 8 },
        { .weight = "w", .type = GGML_TYPE_Q4_K, .ne0 = 128, .ne1 = 8 },
        { .weight = "w", .type = -1, .ne0 = 32, .ne1 = 8 },
        { .weight = "w", .type = GGML_TYPE_COUNT, .ne0 = 32, .ne1 = 8 },
        { .weight = "w", .type = 4, .ne0 = 32, .ne1 = 8 },  // a type that ggml has removed
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        // behind a good one with tables, which must not leak
        const struct tsg_part good = { .weight = "g", .bias = "b", .bias_data = zeros, .scale = "s", .scale_data = zeros, .ne0 = 32, .ne1 = 8 };
        CHECK(rig_failed(tsg_pager_add_layer(pager, pool, 8, 2, (struct tsg_part[]) { good, bad[i] }, 2, &layer), TSG_E_ARGUMENT, "can be paged"));
    }
    CHECK(layer == -1 && rig_failed(tsg_pager_commit(pager), TSG_E_ARGUMENT, "0 experts"));
    tsg_pager_free(pager);
}

static void every_number_of_a_type(void) {
    for (int32_t type = -3; type < GGML_TYPE_COUNT + 3; type++) {
        struct tsg_pager * pager = rig_pager(TSG_POLICY_LFRU);
        struct tsg_part    part  = part_up;
        int32_t            pool, layer;
        part.type = type;
        part.ne0  = 256;
        CHECK(rig_pool(pager, 3, &pool) == TSG_OK);
        const enum tsg_status status = tsg_pager_add_layer(pager, pool, 8, 2, &part, 1, &layer);
        CHECK(status == TSG_OK ? tsg_pager_commit(pager) == TSG_OK : status == TSG_E_ARGUMENT);
        tsg_pager_free(pager);
    }
}

static void a_pool_has_one_layout(void) {
    struct tsg_part other[7];
    for (int i = 0; i < 7; i++) {
        other[i] = part_up;
    }
    other[0].type       = GGML_TYPE_F32;
    other[1].ne0        = 64;
    other[2].ne1        = 16;
    other[3].bias       = "b";
    other[3].bias_data  = zeros;
    other[4].scale      = "s";
    other[4].scale_data = zeros;
    struct tsg_pager * pager = rig_pager(TSG_POLICY_LFRU);
    int32_t            pool, layer = -1;
    CHECK(rig_pool(pager, 4, &pool) == TSG_OK && tsg_pager_add_layer(pager, pool, 8, 2, &part_up, 1, &layer) == TSG_OK);
    for (int i = 0; i < 5; i++) {
        CHECK(rig_failed(tsg_pager_add_layer(pager, pool, 8, 2, &other[i], 1, &layer), TSG_E_ARGUMENT, "another layout"));
    }
    CHECK(rig_failed(tsg_pager_add_layer(pager, pool, 8, 2, &other[5], 2, &layer), TSG_E_ARGUMENT, "another layout"));
    CHECK(layer == 0 && tsg_pager_add_layer(pager, pool, 4, 1, &part_up, 1, &layer) == TSG_OK && layer == 1);
    CHECK(tsg_pager_commit(pager) == TSG_OK);
    tsg_pager_free(pager);
}

static void a_pool_holds_what_one_token_needs(void) {
    struct tsg_pager * pager = rig_pager(TSG_POLICY_LFRU);
    int32_t            good, bad, layer;
    CHECK(rig_pool(pager, 4, &good) == TSG_OK && rig_pool(pager, 3, &bad) == TSG_OK);
    CHECK(tsg_pager_add_layer(pager, good, 8, 4, &part_up, 1, &layer) == TSG_OK);
    CHECK(tsg_pager_add_layer(pager, bad, 8, 2, &part_up, 1, &layer) == TSG_OK);
    CHECK(tsg_pager_add_layer(pager, bad, 8, 4, &part_up, 1, &layer) == TSG_OK);
    CHECK(rig_failed(tsg_pager_commit(pager), TSG_E_ARGUMENT, "3 slots"));
    CHECK(rig_failed(tsg_pager_commit(pager), TSG_E_ARGUMENT, "3 slots"));  // and nothing of the first try is lost
    tsg_pager_free(pager);
}

static void more_memory_than_there_is(void) {
    const struct tsg_part huge  = { .weight = "w", .type = GGML_TYPE_F32, .ne0 = 1 << 16, .ne1 = 1 << 16 };  // 64 TiB
    struct tsg_pager *    pager = rig_pager(TSG_POLICY_LFRU);
    int32_t               pool[2], layer;
    CHECK(rig_pool(pager, 4, &pool[0]) == TSG_OK && rig_pool(pager, TSG_MAX_EXPERTS, &pool[1]) == TSG_OK);
    CHECK(tsg_pager_add_layer(pager, pool[0], 8, 2, &part_up, 1, &layer) == TSG_OK);
    CHECK(tsg_pager_add_layer(pager, pool[1], TSG_MAX_EXPERTS, 2, &huge, 1, &layer) == TSG_OK);
    CHECK(rig_failed(tsg_pager_commit(pager), TSG_E_MEMORY, "CPU has no room for a pool of 4096 experts of 16384.0 MiB"));
    CHECK(rig_failed(tsg_pager_commit(pager), TSG_E_MEMORY, "no room"));
    CHECK(!ggml_backend_buft_alloc_buffer(tsg_pager_buffer_type(pager), (size_t) 1 << 50) && strstr(tsg_last_error(), "1073741824 MiB of addresses"));
    tsg_pager_free(pager);
}

static void a_pager_is_committed_once(void) {
    struct rig rig = rig_new(&small);
    int32_t    index;
    CHECK(tsg_pager_commit(rig.pager) == TSG_OK);
    CHECK(rig_failed(tsg_pager_commit(rig.pager), TSG_E_STATE, "once"));
    CHECK(rig_failed(rig_pool(rig.pager, 4, &index), TSG_E_STATE, "before commit"));
    CHECK(rig_failed(tsg_pager_add_layer(rig.pager, 0, 8, 2, &part_up, 1, &index), TSG_E_STATE, "before commit"));
    tsg_pager_free(rig.pager);
}

static void a_policy_that_does_not_exist(void) {
    struct tsg_pager * pager = rig_pager(TSG_POLICY_LFRU);
    CHECK(rig_failed(tsg_pager_set_policy(pager, (enum tsg_policy) 5), TSG_E_ARGUMENT, "5"));
    CHECK(rig_failed(tsg_pager_set_policy(pager, (enum tsg_policy) -1), TSG_E_ARGUMENT, "-1"));
    tsg_pager_free(pager);
    ggml_backend_dev_t cpu = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    CHECK(rig_failed(tsg_pager_new(cpu, (enum tsg_policy) 5, TSG_ENGINE_HOST, &pager), TSG_E_ARGUMENT, "5"));
}

// ---- before commit ----

static void counters_before_commit(void) {
    struct rig rig = rig_new(&small);
    tsg_pager_reset_stats(rig.pager);
    CHECK(tsg_pager_check_integrity(rig.pager) == TSG_OK && rig_stats(&rig).slots_total == 0);
    CHECK(tsg_pager_set_policy(rig.pager, TSG_POLICY_SLRU) == TSG_OK);
    rig_load(&rig);
    CHECK(rig.pager->pools[0].slots.policy == TSG_POLICY_SLRU);
    rig_close(&rig);
}

static void a_backend_before_commit(void) {
    struct rig rig = rig_new(&small);
    CHECK(!ggml_backend_dev_init(tsg_pager_device(rig.pager), NULL) && strstr(tsg_last_error(), "commit"));
    tsg_pager_free(rig.pager);
}

static void the_device_engine_needs_cuda(void) {
    struct rig rig = rig_open(&small);  // asked for whatever can be
    CHECK(strstr(tsg_pager_engine(rig.pager), "host-driven: ") && !rig_stats(&rig).device_engine);
    CHECK(rig_failed(tsg_pager_set_link(rig.pager, 1e9), TSG_E_ARGUMENT, "device engine"));
    rig.pager->engine = TSG_ENGINE_HOST;
    CHECK(rig_ready(rig.pager) == TSG_OK && strstr(tsg_pager_engine(rig.pager), "as asked"));
    rig.pager->engine = TSG_ENGINE_DEVICE;
    CHECK(rig_ready(rig.pager) == TSG_E_STATE && strlen(tsg_last_error()) > 0);
    rig_close(&rig);
}

// ---- loading ----

static ggml_backend_buffer_t alloc_one(struct tsg_pager * pager, const char * name, enum ggml_type type, int64_t ne1, struct ggml_context ** ctx) {
    *ctx                   = ggml_init((struct ggml_init_params) { .mem_size = 4 * ggml_tensor_overhead(), .no_alloc = true });
    struct ggml_tensor * t = ggml_new_tensor_3d(*ctx, type, N_EMBD, ne1, 8);
    ggml_set_name(t, name);
    return ggml_backend_alloc_ctx_tensors_from_buft(*ctx, tsg_pager_buffer_type(pager));
}

static void tensors_that_were_not_planned(void) {
    struct rig            rig = rig_new(&small);
    struct ggml_context * ctx;
    CHECK(tsg_pager_commit(rig.pager) == TSG_OK);
    CHECK(!alloc_one(rig.pager, "blk.9.ffn_up_exps.weight", GGML_TYPE_Q8_0, N_FF, &ctx) && strstr(tsg_last_error(), "not an expert weight"));
    ggml_free(ctx);
    CHECK(!alloc_one(rig.pager, "blk.1.ffn_up_exps.weight", GGML_TYPE_F32, N_FF, &ctx) && strstr(tsg_last_error(), "type or shape"));
    ggml_free(ctx);
    CHECK(!alloc_one(rig.pager, "blk.1.ffn_up_exps.weight", GGML_TYPE_Q8_0, N_FF + 1, &ctx) && strstr(tsg_last_error(), "type or shape"));
    ggml_free(ctx);
    CHECK(rig_stats(&rig).host_bytes == 0);
    tsg_pager_free(rig.pager);
}

// Tensors that come behind the model's weights are an adapter's: memory of the inner device, as many bytes as it wants for them.
static void what_comes_later_lies_on_the_device(void) {
    struct rig            rig = rig_open(&small);
    struct ggml_context * ctx;
    CHECK(rig.paged.adapter->buft == ggml_backend_cpu_buffer_type() && rig.paged.experts->buft == tsg_pager_buffer_type(rig.pager));
    ggml_backend_buffer_t buffer = alloc_one(rig.pager, "blk.0.ffn_up_exps.weight.lora_a", GGML_TYPE_Q4_0, N_FF, &ctx);
    struct ggml_tensor *  t      = ggml_get_first_tensor(ctx);
    CHECK(buffer && buffer->buft == ggml_backend_cpu_buffer_type() && !t->extra);
    CHECK(ggml_backend_buft_get_alignment(tsg_pager_buffer_type(rig.pager)) >= ggml_backend_buft_get_alignment(buffer->buft));
    CHECK(ggml_backend_buft_get_alloc_size(tsg_pager_buffer_type(rig.pager), t) >= ggml_backend_buft_get_alloc_size(buffer->buft, t));
    memset(t->data, 1, ggml_nbytes(t));
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    ggml_backend_buffer_free(rig.paged.experts);  // the model goes: what comes then may be its weights again
    rig.paged.experts = NULL;
    CHECK(!alloc_one(rig.pager, "blk.0.ffn_up_exps.weight.lora_a", GGML_TYPE_Q4_0, N_FF, &ctx) && strstr(tsg_last_error(), "not an expert weight"));
    ggml_free(ctx);
    rig_close(&rig);
}

static void ready_when_every_byte_has_arrived(void) {
    struct rig            rig = rig_new(&small);
    struct ggml_context * ctx;
    CHECK(rig_ready(rig.pager) == TSG_E_STATE);
    CHECK(tsg_pager_commit(rig.pager) == TSG_OK);
    CHECK(rig_failed(rig_ready(rig.pager), TSG_E_STATE, "blk.0.ffn_gate_exps.weight: 0 of"));
    ggml_backend_buffer_t buffer = alloc_one(rig.pager, "blk.0.ffn_gate_exps.weight", GGML_TYPE_Q8_0, N_FF, &ctx);
    ggml_backend_tensor_set(ggml_get_first_tensor(ctx), zeros, 0, 100);
    CHECK(rig_failed(rig_ready(rig.pager), TSG_E_STATE, "blk.0.ffn_gate_exps.weight: 100 of"));
    CHECK(rig_stats(&rig).host_bytes == 100 && rig_stats(&rig).host_tensors == 1);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    tsg_pager_free(rig.pager);
}

static void the_host_pool_is_the_file(void) {
    struct rig           rig = rig_open(&small);
    struct ggml_tensor * w   = rig.paged.weight[1][2];
    const size_t         n   = ggml_nbytes(w);
    uint8_t *            a   = malloc(n);
    uint8_t *            b   = malloc(n);
    ggml_backend_tensor_get(w, a, 0, n);
    ggml_backend_tensor_get(rig.plain.weight[1][2], b, 0, n);
    CHECK(memcmp(a, b, n) == 0);
    for (int32_t e = 0; e < 8; e++) {
        const void * host;
        size_t       size;
        CHECK(tsg_expert_host(rig.pager, 1, e, 2, &host, &size) == TSG_OK && size == n / 8 && memcmp(host, a + (size_t) e * size, size) == 0);
    }
    uint64_t bytes = 0;
    for (int32_t i = 0; i < 6; i++) {
        bytes += ggml_nbytes(rig.paged.weight[i / 3][i % 3]);
    }
    CHECK(rig_stats(&rig).host_bytes == bytes && rig_stats(&rig).host_tensors == 6);
    ggml_backend_tensor_memset(w, 7, 3, n - 3);  // it is the file, which nobody writes
    ggml_backend_buffer_clear(rig.paged.experts, 1);
    ggml_backend_tensor_get(w, b, 0, n);
    CHECK(memcmp(a, b, n) == 0);
    free(a);
    free(b);
    rig_close(&rig);
}

// ---- freeing ----

static void every_order_of_freeing(void) {
    const int orders[][3] = { { 0, 1, 2 }, { 0, 2, 1 }, { 1, 0, 2 }, { 1, 2, 0 }, { 2, 0, 1 }, { 2, 1, 0 } };
    for (size_t i = 0; i < 6; i++) {
        struct rig rig = rig_open(&small);
        rig_compare_random(&rig, rig.paged.backend, 3, 1);
        for (int j = 0; j < 3; j++) {
            if (orders[i][j] == 0) {
                ggml_backend_free(rig.paged.backend);
                rig.paged.backend = NULL;
            } else if (orders[i][j] == 1) {
                ggml_backend_buffer_free(rig.paged.experts);
                rig.paged.experts = NULL;
            } else {
                tsg_pager_free(rig.pager);
            }
        }
        side_free(&rig.plain);
        side_free(&rig.paged);
    }
}

static void a_model_goes_on_after_the_caller_let_go(void) {
    struct rig rig = rig_open(&small);
    tsg_pager_free(rig.pager);  // a buffer and a backend still hold it
    for (uint64_t seed = 1; seed < 5; seed++) {
        rig_compare_random(&rig, rig.paged.backend, (int32_t) seed * 10, seed);
    }
    side_free(&rig.paged);
    side_free(&rig.plain);
}

static void weights_are_gone_with_their_buffer(void) {
    struct rig   rig = rig_open(&small);
    const void * host;
    size_t       size;
    side_free(&rig.paged);
    CHECK(rig_failed(tsg_expert_host(rig.pager, 0, 0, 0, &host, &size), TSG_E_STATE, "not loaded"));
    CHECK(tsg_expert_prefetch(rig.pager, 0, 0) == TSG_E_STATE);
    CHECK(tsg_expert_pin(rig.pager, 0, 0, true) == TSG_E_STATE);
    CHECK(rig_ready(rig.pager) == TSG_E_STATE && rig_stats(&rig).host_bytes == 0);
    side_free(&rig.plain);
    tsg_pager_free(rig.pager);
}

// ---- the proxy device ----

static void the_device_is_the_inner_one_but_a_gpu(void) {
    struct rig                    rig = rig_open(&small);
    ggml_backend_dev_t            dev = tsg_pager_device(rig.pager);
    ggml_backend_buffer_type_t    cpu = ggml_backend_cpu_buffer_type();
    struct ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);
    CHECK(props.type == GGML_BACKEND_DEVICE_TYPE_GPU && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU);
    CHECK(!props.caps.buffer_from_host_ptr);
    CHECK(strcmp(ggml_backend_dev_name(dev), "CPU") == 0 && strcmp(ggml_backend_name(rig.paged.backend), "CPU") == 0);
    CHECK(ggml_backend_get_device(rig.paged.backend) == dev && ggml_backend_dev_buffer_type(dev) == cpu);
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    CHECK(ggml_backend_reg_dev_count(reg) == 1 && ggml_backend_reg_dev_get(reg, 0) == dev);
    // The expert buffer type: the device takes it, nobody else does, and it never stands in for host memory.
    ggml_backend_buffer_type_t experts = tsg_pager_buffer_type(rig.pager);
    struct rig                 other   = rig_new(&small);
    CHECK(ggml_backend_dev_supports_buft(dev, experts) && ggml_backend_dev_supports_buft(dev, cpu));
    CHECK(!ggml_backend_dev_supports_buft(rig.cpu, experts) && !ggml_backend_dev_supports_buft(tsg_pager_device(other.pager), experts));
    CHECK(!ggml_backend_buft_is_host(experts) && ggml_backend_buft_get_device(experts) == dev && ggml_backend_dev_host_buffer_type(dev) != experts);
    tsg_pager_free(other.pager);
    rig_close(&rig);
}

static void expert_weights_are_for_matmuls_by_id(void) {
    struct rig            rig = rig_open(&small);
    ggml_backend_dev_t    dev = tsg_pager_device(rig.pager);
    struct ggml_tensor *  w   = rig.paged.weight[0][0];
    struct ggml_context * ctx = ggml_init((struct ggml_init_params) { .mem_size = 16 * ggml_tensor_overhead(), .no_alloc = true });
    struct ggml_tensor *  x   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, N_EMBD, 1, 1);
    struct ggml_tensor *  ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, 1);
    CHECK(ggml_backend_dev_supports_op(dev, ggml_mul_mat_id(ctx, w, x, ids)));
    CHECK(!ggml_backend_dev_supports_op(dev, ggml_mul_mat(ctx, w, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, N_EMBD, 1, 8))));
    CHECK(!ggml_backend_dev_supports_op(dev, ggml_get_rows(ctx, w, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, 8))));
    CHECK(ggml_backend_dev_supports_op(dev, ggml_mul_mat_id(ctx, rig.plain.weight[0][0], x, ids)));
    ggml_free(ctx);
    rig_close(&rig);
}

static void facts_of_a_device(void) {
    ggml_backend_dev_t cpu = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    struct tsg_device  facts;
    tsg_device_get(cpu, &facts);
    CHECK(facts.is_cpu && strcmp(facts.name, "CPU") == 0 && facts.memory_total > 0 && facts.memory_free <= facts.memory_total);
    CHECK(tsg_device_link_rate(cpu, 1 << 20, 3) > 0 && tsg_device_link_rate(cpu, (size_t) 1 << 46, 1) == 0);
    CHECK(tsg_device_supports(cpu, GGML_TYPE_Q4_K, 256, 64, 8, 2) && tsg_device_supports(cpu, GGML_TYPE_F32, 64, 64, 8, 2));
}

static void the_abi_guard(void) {
    const size_t model = sizeof(struct llama_model_params), context = sizeof(struct llama_context_params);
    CHECK(tsg_abi_check((void *) ggml_version, model, context) == TSG_OK && strcmp(tsg_ggml_version(), ggml_version()) == 0);
    CHECK(rig_failed(tsg_abi_check(zeros, model, context), TSG_E_ABI, "two copies"));
    CHECK(rig_failed(tsg_abi_check((void *) ggml_version, model + 8, context), TSG_E_ABI, "llama_model_params"));
    CHECK(rig_failed(tsg_abi_check((void *) ggml_version, model, context - 8), TSG_E_ABI, "llama_context_params"));
}

int main(int argc, char ** argv) {
    const struct test tests[] = {
        TEST(pools_that_cannot_be),
        TEST(layers_that_cannot_be),
        TEST(weights_that_cannot_be),
        TEST(every_number_of_a_type),
        TEST(a_pool_has_one_layout),
        TEST(a_pool_holds_what_one_token_needs),
        TEST(more_memory_than_there_is),
        TEST(a_pager_is_committed_once),
        TEST(a_policy_that_does_not_exist),
        TEST(the_device_engine_needs_cuda),
        TEST(tensors_that_were_not_planned),
        TEST(what_comes_later_lies_on_the_device),
        TEST(ready_when_every_byte_has_arrived),
        TEST(the_host_pool_is_the_file),
        TEST(every_order_of_freeing),
        TEST(a_model_goes_on_after_the_caller_let_go),
        TEST(weights_are_gone_with_their_buffer),
        TEST(counters_before_commit),
        TEST(a_backend_before_commit),
        TEST(the_device_is_the_inner_one_but_a_gpu),
        TEST(expert_weights_are_for_matmuls_by_id),
        TEST(facts_of_a_device),
        TEST(the_abi_guard),
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
