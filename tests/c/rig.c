// rig.c - see rig.h. The graph is what llama.cpp builds for a layer of experts: build_moe_ffn and build_lora_mm_id in llama-graph.cpp.
#include "rig.h"

const char * const rig_part_names[2][RIG_PARTS] = { { "gate", "up", "down" }, { "gate_up", "down" } };

int32_t rig_n_parts(const struct spec * spec) {
    return spec->fused ? 2 : 3;
}

static bool is_down(const struct spec * spec, int32_t part) {
    return part == rig_n_parts(spec) - 1;
}

int64_t rig_ne0(const struct spec * spec, int32_t part) {
    return is_down(spec, part) ? N_FF : N_EMBD;
}

int64_t rig_ne1(const struct spec * spec, int32_t part) {
    return is_down(spec, part) ? N_EMBD : spec->fused ? 2 * N_FF : N_FF;
}

// ---- values: the same on both sides, from the names of the tensors ----

static float * random_values(const char * name, size_t n, float centre, float spread) {
    uint64_t seed   = 1;
    float *  values = malloc(n * sizeof(float));
    for (const char * c = name; *c; c++) {
        seed = seed * 31 + (uint64_t) *c;
    }
    for (size_t i = 0; i < n; i++) {
        values[i] = centre + spread * ((float) random_below(&seed, 2001) / 1000 - 1);
    }
    return values;
}

static void part_name(char * name, const struct spec * spec, int32_t layer, int32_t part, const char * suffix) {
    snprintf(name, GGML_MAX_NAME, "blk.%d.ffn_%s_exps.%s", layer, rig_part_names[spec->fused][part], suffix);
}

static float * bias_values(const struct spec * spec, int32_t layer, int32_t part) {
    char name[GGML_MAX_NAME];
    part_name(name, spec, layer, part, "bias");
    return random_values(name, (size_t) (spec->n_expert[layer] * rig_ne1(spec, part)), 0, 1);
}

static float * scale_values(const struct spec * spec, int32_t layer, int32_t part) {
    char name[GGML_MAX_NAME];
    part_name(name, spec, layer, part, "scale");
    return random_values(name, (size_t) spec->n_expert[layer], 1, 0.5f);
}

static void set_random(struct ggml_tensor * tensor, float centre, float spread) {
    float * values = random_values(tensor->name, (size_t) ggml_nelements(tensor), centre, spread);
    ggml_backend_tensor_set(tensor, values, 0, ggml_nbytes(tensor));
    free(values);
}

// Of [ne0, rows]; free() it.
static void * weight_bytes(const char * name, enum ggml_type type, int64_t ne0, int64_t rows) {
    const size_t n      = ggml_row_size(type, ne0) * (size_t) rows;
    float *      values = random_values(name, (size_t) (ne0 * rows), 0, 0.3f);
    void *       bytes  = malloc(n);
    CHECK(ggml_quantize_chunk(type, values, bytes, 0, rows, ne0, NULL) == n);
    free(values);
    return bytes;
}

// In pieces, as a loader may.
static void set_weight(struct ggml_tensor * tensor) {
    const size_t n = ggml_nbytes(tensor), third = n / 3;
    void *       bytes = weight_bytes(tensor->name, tensor->type, tensor->ne[0], ggml_nrows(tensor));
    ggml_backend_tensor_set(tensor, bytes, 0, third);
    ggml_backend_tensor_set(tensor, (char *) bytes + third, third, n - third);
    free(bytes);
}

// ---- one side ----

static struct ggml_context * new_ctx(void) {
    return ggml_init((struct ggml_init_params) { .mem_size = 64 * ggml_tensor_overhead(), .no_alloc = true });
}

static void new_layer(struct side * side, const struct spec * spec, int32_t l) {
    const int64_t n = spec->n_expert[l];
    char          name[GGML_MAX_NAME];
    for (int32_t p = 0; p < rig_n_parts(spec); p++) {
        const int64_t ne1  = rig_ne1(spec, p);
        side->weight[l][p] = ggml_new_tensor_3d(side->ctx_experts, spec->type, rig_ne0(spec, p), ne1, n);
        part_name(name, spec, l, p, "weight");
        ggml_set_name(side->weight[l][p], name);
        if (spec->tables) {
            side->bias[l][p]  = ggml_new_tensor_2d(side->ctx_rest, GGML_TYPE_F32, ne1, n);
            side->scale[l][p] = ggml_new_tensor_1d(side->ctx_rest, GGML_TYPE_F32, n);
            part_name(name, spec, l, p, "bias");
            ggml_set_name(side->bias[l][p], name);
            part_name(name, spec, l, p, "scale");
            ggml_set_name(side->scale[l][p], name);
        }
    }
    side->lora_a[l] = ggml_new_tensor_3d(side->ctx_adapter, GGML_TYPE_F32, N_EMBD, 4, n);
    side->lora_b[l] = ggml_new_tensor_3d(side->ctx_adapter, GGML_TYPE_F32, 4, rig_ne1(spec, 0), n);
    ggml_format_name(side->lora_a[l], "blk.%d.lora_a", l);
    ggml_format_name(side->lora_b[l], "blk.%d.lora_b", l);
}

static struct side side_load(const struct spec * spec, ggml_backend_t backend, ggml_backend_buffer_type_t experts) {
    struct side side = { .backend = backend, .ctx_experts = new_ctx(), .ctx_rest = new_ctx(), .ctx_adapter = new_ctx() };
    for (int32_t l = 0; l < spec->n_layers; l++) {
        new_layer(&side, spec, l);
    }
    side.experts = ggml_backend_alloc_ctx_tensors_from_buft(side.ctx_experts, experts);
    side.rest    = ggml_backend_alloc_ctx_tensors_from_buft(side.ctx_rest, ggml_backend_cpu_buffer_type());
    side.adapter = ggml_backend_alloc_ctx_tensors_from_buft(side.ctx_adapter, experts);
    CHECK(side.experts && (side.rest || !spec->tables) && side.adapter);
    for (int32_t l = 0; l < spec->n_layers; l++) {
        for (int32_t p = 0; p < rig_n_parts(spec); p++) {
            set_weight(side.weight[l][p]);
            if (spec->tables) {
                set_random(side.bias[l][p], 0, 1);
                set_random(side.scale[l][p], 1, 0.5f);
            }
        }
        set_random(side.lora_a[l], 0, 0.3f);
        set_random(side.lora_b[l], 0, 0.3f);
    }
    return side;
}

void side_free(struct side * side) {
    ggml_backend_free(side->backend);
    ggml_backend_buffer_free(side->experts);
    ggml_backend_buffer_free(side->rest);
    ggml_backend_buffer_free(side->adapter);
    ggml_free(side->ctx_adapter);
    ggml_free(side->ctx_experts);
    ggml_free(side->ctx_rest);
}

// ---- both ----

// A file without a name. It begins with something that is no weight.
static int new_file(struct tsg_pager * pager) {
    char      path[] = "/tmp/rig-XXXXXX";
    const int file   = mkstemp(path);
    CHECK(file >= 0 && write(file, "header", 6) == 6 && lseek(file, 96, SEEK_SET) == 96);
    CHECK(tsg_pager_add_file(pager, path) == TSG_OK && unlink(path) == 0);
    return file;
}

// Appends the weight to its shard, aligned to 32 bytes as in a GGUF.
static void write_weight(struct rig * rig, int32_t l, struct tsg_part * part) {
    const int    file  = rig->file[l % 2];
    const size_t n     = ggml_row_size(rig->spec.type, part->ne0) * (size_t) (part->ne1 * rig->spec.n_expert[l]);
    void *       bytes = weight_bytes(part->weight, rig->spec.type, part->ne0, part->ne1 * rig->spec.n_expert[l]);
    const off_t  at    = lseek(file, (lseek(file, 0, SEEK_CUR) + 31) / 32 * 32, SEEK_SET);
    CHECK(at >= 96 && write(file, bytes, n) == (ssize_t) n);
    part->shard  = l % 2;
    part->offset = (uint64_t) at;
    free(bytes);
}

static void add_layer(struct rig * rig, int32_t l, int32_t pool) {
    const struct spec * spec = &rig->spec;
    struct tsg_part     parts[RIG_PARTS];
    char                names[RIG_PARTS][3][GGML_MAX_NAME];
    for (int32_t p = 0; p < rig_n_parts(spec); p++) {
        part_name(names[p][0], spec, l, p, "weight");
        part_name(names[p][1], spec, l, p, "bias");
        part_name(names[p][2], spec, l, p, "scale");
        parts[p] = (struct tsg_part) {
            .weight     = names[p][0],
            .bias       = spec->tables ? names[p][1] : NULL,
            .scale      = spec->tables ? names[p][2] : NULL,
            .bias_data  = spec->tables ? bias_values(spec, l, p) : NULL,
            .scale_data = spec->tables ? scale_values(spec, l, p) : NULL,
            .type       = spec->type,
            .ne0        = rig_ne0(spec, p),
            .ne1        = rig_ne1(spec, p),
        };
        write_weight(rig, l, &parts[p]);
    }
    CHECK(tsg_pager_add_layer(rig->pager, pool, spec->n_expert[l], spec->n_used, parts, rig_n_parts(spec), &rig->layer[l]) == TSG_OK);
    for (int32_t p = 0; p < rig_n_parts(spec); p++) {
        free((void *) parts[p].bias_data);
        free((void *) parts[p].scale_data);
    }
}

struct tsg_pager * rig_pager(enum tsg_policy policy) {
    struct tsg_pager * pager;
    CHECK(tsg_pager_new(ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0), policy, TSG_ENGINE_AUTO, &pager) == TSG_OK);
    return pager;
}

enum tsg_status rig_ready(struct tsg_pager * pager) {
    return tsg_pager_ready(pager, NULL, NULL);
}

enum tsg_status rig_pool(struct tsg_pager * pager, int64_t n_slots, int32_t * pool) {
    return tsg_pager_add_pool(pager, n_slots, 1, pool);
}

struct ggml_tensor * rig_stage(const struct tsg_pool * pool, int32_t part) {
    return pool->stage[0][part];
}

struct rig rig_new(const struct spec * spec) {
    struct rig rig = { .spec = *spec, .cpu = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0), .pager = rig_pager(spec->policy) };
    int32_t    pool[2];
    rig.file[0] = new_file(rig.pager);
    rig.file[1] = new_file(rig.pager);
    for (int i = 0; i <= spec->pools; i++) {
        CHECK(rig_pool(rig.pager, spec->n_slots, &pool[i]) == TSG_OK && pool[i] == i);
    }
    for (int32_t l = 0; l < spec->n_layers; l++) {
        add_layer(&rig, l, spec->pools ? pool[l % 2] : pool[0]);
        CHECK(rig.layer[l] == l);
    }
    return rig;
}

static ggml_backend_t one_thread(ggml_backend_t backend) {
    ggml_backend_reg_t           reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    ggml_backend_set_n_threads_t set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    CHECK(set != NULL);
    set(backend, 1);
    return backend;
}

ggml_backend_t rig_backend(struct rig * rig) {
    ggml_backend_t backend = ggml_backend_dev_init(tsg_pager_device(rig->pager), NULL);
    CHECK(backend != NULL);
    return one_thread(backend);
}

void rig_offer(struct rig * rig) {
    CHECK(tsg_pager_commit(rig->pager) == TSG_OK);
    rig->plain = side_load(&rig->spec, one_thread(ggml_backend_dev_init(rig->cpu, NULL)), ggml_backend_cpu_buffer_type());
    rig->paged = side_load(&rig->spec, rig_backend(rig), tsg_pager_buffer_type(rig->pager));
}

void rig_load(struct rig * rig) {
    rig_offer(rig);
    CHECK(rig_ready(rig->pager) == TSG_OK);
}

struct rig rig_open(const struct spec * spec) {
    struct rig rig = rig_new(spec);
    rig_load(&rig);
    return rig;
}

void rig_close(struct rig * rig) {
    side_free(&rig->plain);
    side_free(&rig->paged);
    tsg_pager_free(rig->pager);
    close(rig->file[0]);
    close(rig->file[1]);
}

struct tsg_stats rig_stats(struct rig * rig) {
    struct tsg_stats stats;
    tsg_pager_stats(rig->pager, &stats);
    return stats;
}

bool rig_failed(enum tsg_status got, enum tsg_status want, const char * message) {
    if (got != want || !strstr(tsg_last_error(), message)) {
        fprintf(stderr, "status %d, message: %s\n", (int) got, tsg_last_error());
        return false;
    }
    return true;
}

// ---- a batch ----

struct batch * batch_random(const struct spec * spec, int32_t n_tokens, uint64_t seed) {
    struct batch * batch = calloc(1, sizeof(struct batch));
    CHECK(batch && n_tokens <= MAX_TOKENS);
    batch->n_tokens = n_tokens;
    batch->n_out    = n_tokens;
    batch->n_used   = spec->n_used;
    for (int32_t i = 0; i < n_tokens * N_EMBD; i++) {
        batch->x[i] = (float) random_below(&seed, 2001) / 1000 - 1;
    }
    for (int32_t l = 0; l < spec->n_layers; l++) {
        for (int32_t t = 0; t < n_tokens; t++) {
            int32_t * order = batch->order[l] + t * spec->n_expert[l];
            float *   probs = batch->probs[l] + t * spec->n_expert[l];
            shuffle(&seed, order, spec->n_expert[l]);
            for (int32_t i = 0; i < spec->n_expert[l]; i++) {  // descending: argsort gives the same order
                probs[order[i]] = 1.0f / (float) (i + 2);
            }
        }
    }
    return batch;
}

// ---- the graph ----

struct builder {
    struct ggml_context * ctx;
    const struct rig *    rig;
    const struct side *   side;
    const struct batch *  batch;
    struct ggml_tensor *  ids;
    int32_t               layer;
};

// Expert weight x, then adapter, scale and bias of the experts.
static struct ggml_tensor * build_matmul(const struct builder * b, int32_t part, struct ggml_tensor * x) {
    const struct side *  side   = b->side;
    struct ggml_tensor * weight = side->weight[b->layer][part];
    if (b->batch->view_of_weight) {
        weight = ggml_view_3d(b->ctx, weight, weight->ne[0], weight->ne[1], weight->ne[2], weight->nb[1], weight->nb[2], 0);
    }
    struct ggml_tensor * y = ggml_mul_mat_id(b->ctx, weight, x, b->ids);
    if (side->scale[b->layer][part]) {
        struct ggml_tensor * table = side->scale[b->layer][part];
        struct ggml_tensor * s     = ggml_repeat_4d(b->ctx, ggml_reshape_3d(b->ctx, table, 1, table->ne[0], 1), 1, table->ne[0], x->ne[2], 1);
        y                          = ggml_mul(b->ctx, y, ggml_get_rows(b->ctx, s, b->ids));
    }
    if (b->rig->spec.adapter && part == 0) {
        struct ggml_tensor * low = ggml_mul_mat_id(b->ctx, side->lora_a[b->layer], x, b->ids);
        y                        = ggml_add(b->ctx, y, ggml_mul_mat_id(b->ctx, side->lora_b[b->layer], low, b->ids));
    }
    if (side->bias[b->layer][part]) {
        y = ggml_add_id(b->ctx, y, side->bias[b->layer][part], b->ids);
    }
    return y;
}

// Experts, weighted by the router's probabilities, which are looked up by expert id within the step.
static struct ggml_tensor * build_layer(const struct builder * b, struct ggml_tensor * x, struct ggml_tensor * probs) {
    struct ggml_context * ctx = b->ctx;
    const int64_t n_tokens = x->ne[1], n_used = b->ids->ne[0], n_expert = probs->ne[0];
    struct ggml_tensor *  in = ggml_reshape_3d(ctx, x, N_EMBD, 1, n_tokens);
    struct ggml_tensor *  h;
    if (b->rig->spec.loose) {
        struct ggml_tensor * both = build_matmul(b, 0, in), * up = build_matmul(b, b->rig->spec.fused ? 0 : 1, in);
        struct ggml_tensor * gate = ggml_silu(ctx, ggml_view_3d(ctx, both, N_FF, both->ne[1], both->ne[2], both->nb[1], both->nb[2], 0));
        up = ggml_clamp_inplace(ctx, ggml_view_3d(ctx, up, N_FF, up->ne[1], up->ne[2], up->nb[1], up->nb[2], up->nb[1] - N_FF * sizeof(float)), -0.5f, 0.5f);
        h  = ggml_mul(ctx, ggml_clamp(ctx, ggml_scale(ctx, gate, 1.5f), -0.1f, 0.6f), ggml_cont(ctx, up));
    } else if (b->rig->spec.fused) {
        h = ggml_swiglu(ctx, build_matmul(b, 0, in));
    } else {
        struct ggml_tensor * up = build_matmul(b, 1, in);
        h                       = ggml_swiglu_split(ctx, build_matmul(b, 0, in), up);
    }
    h                          = build_matmul(b, rig_n_parts(&b->rig->spec) - 1, h);
    struct ggml_tensor * share = ggml_get_rows(ctx, ggml_reshape_3d(ctx, probs, 1, n_expert, n_tokens), b->ids);
    h                          = ggml_mul(ctx, h, share);
    struct ggml_tensor * sum   = x;
    for (int64_t i = 0; i < n_used; i++) {
        sum = ggml_add(ctx, sum, ggml_view_2d(ctx, h, N_EMBD, n_tokens, h->nb[2], (size_t) i * h->nb[1]));
    }
    return ggml_rms_norm(ctx, sum, 1e-6f);
}

static struct ggml_tensor * new_input(struct ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1) {
    struct ggml_tensor * t = ggml_new_tensor_2d(ctx, type, ne0, ne1);
    ggml_set_input(t);
    ggml_set_output(t);  // and nobody else's memory
    return t;
}

struct graph graph_build(const struct rig * rig, const struct side * side, const struct batch * batch) {
    int64_t      n_tokens = batch->n_tokens;
    struct graph g        = { .n_layers = rig->spec.n_layers };
    g.ctx   = ggml_init((struct ggml_init_params) { .mem_size = 512 * ggml_tensor_overhead() + ggml_graph_overhead(), .no_alloc = true });
    g.graph = ggml_new_graph(g.ctx);
    struct ggml_tensor * x = g.x = new_input(g.ctx, GGML_TYPE_F32, N_EMBD, n_tokens);
    for (int32_t l = 0; l < g.n_layers; l++) {
        const int64_t  n_expert = rig->spec.n_expert[l];
        struct builder b        = { .ctx = g.ctx, .rig = rig, .side = side, .batch = batch, .layer = l };
        if (l == g.n_layers - 1 && batch->n_out != n_tokens) {
            n_tokens  = batch->n_out;
            g.out_ids = new_input(g.ctx, GGML_TYPE_I32, n_tokens, 1);
            x         = ggml_get_rows(g.ctx, x, g.out_ids);
        }
        g.probs[l] = new_input(g.ctx, GGML_TYPE_F32, n_expert, n_tokens);
        if (batch->argsort) {
            b.ids = ggml_argsort_top_k(g.ctx, g.probs[l], batch->n_used);
        } else {
            g.order[l] = new_input(g.ctx, GGML_TYPE_I32, batch->packed ? batch->n_used : n_expert, n_tokens);
            b.ids      = ggml_view_2d(g.ctx, g.order[l], batch->n_used, n_tokens, g.order[l]->nb[1], 0);
        }
        x = g.out[l] = build_layer(&b, x, g.probs[l]);
        ggml_set_output(x);
        ggml_build_forward_expand(g.graph, x);
    }
    g.alloc = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
    CHECK(ggml_gallocr_alloc_graph(g.alloc, g.graph));
    graph_set_inputs(&g, batch);
    return g;
}

void graph_set_inputs(struct graph * g, const struct batch * batch) {
    ggml_backend_tensor_set(g->x, batch->x, 0, ggml_nbytes(g->x));
    for (int32_t i = 0; g->out_ids && i < batch->n_out; i++) {  // the last tokens, backwards
        const int32_t id = batch->n_tokens - 1 - i;
        ggml_backend_tensor_set(g->out_ids, &id, (size_t) i * sizeof(id), sizeof(id));
    }
    for (int32_t l = 0; l < g->n_layers; l++) {
        struct ggml_tensor * order = g->order[l];
        ggml_backend_tensor_set(g->probs[l], batch->probs[l], 0, ggml_nbytes(g->probs[l]));
        for (int64_t t = 0; order && t < order->ne[1]; t++) {
            ggml_backend_tensor_set(order, batch->order[l] + t * g->probs[l]->ne[0], (size_t) t * order->nb[1], order->nb[1]);
        }
    }
}

void graph_free(struct graph * g) {
    ggml_gallocr_free(g->alloc);
    ggml_free(g->ctx);
}

bool graph_same_output(const struct graph * a, const struct graph * b) {
    for (int32_t l = 0; l < a->n_layers; l++) {
        const float * x = a->out[l]->data;
        const float * y = b->out[l]->data;
        for (int64_t i = 0; i < ggml_nelements(a->out[l]); i++) {
            if (memcmp(&x[i], &y[i], sizeof(float)) != 0 || x[i] != x[i]) {
                fprintf(stderr, "layer %d, element %lld: %.9g, not %.9g\n", l, (long long) i, (double) y[i], (double) x[i]);
                return false;
            }
        }
    }
    return true;
}

// ---- comparing ----

void rig_check_slots(struct rig * rig) {
    for (int32_t l = 0; l < rig->spec.n_layers; l++) {
        for (int32_t e = 0; e < rig->spec.n_expert[l]; e++) {
            struct tsg_expert expert;
            CHECK(tsg_expert_get(rig->pager, rig->layer[l], e, &expert) == TSG_OK);
            for (int32_t p = 0; p < rig_n_parts(&rig->spec) && expert.slot >= 0; p++) {
                const void * host;
                size_t       size;
                CHECK(tsg_expert_host(rig->pager, rig->layer[l], e, p, &host, &size) == TSG_OK);
                void * slot = malloc(size);
                CHECK(tsg_expert_read_slot(rig->pager, rig->layer[l], e, p, slot, size) == TSG_OK);
                CHECK(memcmp(host, slot, size) == 0);
                free(slot);
            }
        }
    }
}

void rig_compare(struct rig * rig, const struct batch * batch) {
    struct graph plain = graph_build(rig, &rig->plain, batch);
    struct graph paged = graph_build(rig, &rig->paged, batch);
    const size_t n     = (size_t) ggml_graph_n_nodes(paged.graph);

    struct ggml_cgraph   before = *paged.graph;
    struct ggml_tensor * nodes  = malloc(n * sizeof(struct ggml_tensor));
    for (size_t i = 0; i < n; i++) {
        memcpy(&nodes[i], paged.graph->nodes[i], sizeof(struct ggml_tensor));
    }
    CHECK(ggml_backend_graph_compute(rig->plain.backend, plain.graph) == GGML_STATUS_SUCCESS);
    CHECK(ggml_backend_graph_compute(rig->paged.backend, paged.graph) == GGML_STATUS_SUCCESS);
    CHECK(graph_same_output(&plain, &paged));
    CHECK(memcmp(&before, paged.graph, sizeof(before)) == 0);
    for (size_t i = 0; i < n; i++) {
        CHECK(memcmp(&nodes[i], paged.graph->nodes[i], sizeof(struct ggml_tensor)) == 0);
    }
    free(nodes);
    CHECK(tsg_pager_check_integrity(rig->pager) == TSG_OK);
    rig_check_slots(rig);
    graph_free(&plain);
    graph_free(&paged);
}

void rig_compare_random(struct rig * rig, ggml_backend_t backend, int32_t n_tokens, uint64_t seed) {
    struct batch * batch = batch_random(&rig->spec, n_tokens, seed);
    ggml_backend_t own   = rig->paged.backend;
    rig->paged.backend   = backend;
    rig_compare(rig, batch);
    rig->paged.backend = own;
    free(batch);
}
