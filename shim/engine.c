// engine.c - the host-driven engine: runs a graph on the inner backend, with the experts that each layer wants made resident first.
//
// A graph is cut in front of the first expert matmul of each layer. What stands before the cut runs, the router's ids are read back (one sync a
// layer), missing experts are copied on the same stream, and the layer's nodes are pointed at one of three places:
//   slots     few tokens: the pool's slot tensors, ids translated to slots
//   stage     many tokens: the layer's experts in the model's own order, ids untouched. CUDA's MMQ splits the sums by expert index (stream-k), so
//             only this order gives the last bits that llama.cpp gives
//   resident  the pool holds everything: a view of it, ids untouched and never read, the graph not even cut
// Copies and kernels share one stream, so no kernel reads a slot that a later copy overwrites. A second context of the same model waits its turn.
//
// On CUDA it serves what resident.c and stream.c do not: a first prompt, which fills the pool, odd graphs, Python policies; and it is their oracle.
#include "engine.h"

#include <stdlib.h>
#include <string.h>

#define CPU_SLOT_TOKENS 32  // ggml-cpu reserves a row map of n_slots x tokens

// ---- how many tokens may go through slots ----

// Up to so many tokens ggml-cuda multiplies expert rows one by one (MMVQ), where an expert's place does not change a bit. From there on it is MMQ.
// Source: get_mmvq_mmid_max_batch_turing_plus() in ggml-cuda/mmvq.cu, the lowest of the tables for compute capability 7.5 and up.
static int64_t cuda_slot_tokens(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q3_K:
            return 5;
        case GGML_TYPE_IQ3_S:
            return 6;
        case GGML_TYPE_IQ2_S:
        case GGML_TYPE_IQ3_XXS:
        case GGML_TYPE_MXFP4:
        case GGML_TYPE_Q2_K:
            return 7;
        default:
            return 8;
    }
}

static int64_t slot_tokens(const struct tsg_pager * pager, const struct tsg_layer * layer) {
    if (pager->inner_is_cpu) {
        return CPU_SLOT_TOKENS;
    }
    int64_t tokens = TSG_DECODE_TOKENS;
    for (int32_t p = 0; p < layer->n_parts; p++) {
        const int64_t limit = cuda_slot_tokens(layer->weight[p].type);
        tokens              = limit < tokens ? limit : tokens;
    }
    return tokens;
}

int64_t tsg_engine_step_tokens(const struct tsg_engine * e, const struct tsg_step * step) {
    return slot_tokens(e->pager, step->layer);
}

int64_t tsg_engine_slot_tokens(const struct tsg_engine * e) {
    int64_t tokens = CPU_SLOT_TOKENS;
    for (int i = 0; i < e->graph.n_steps; i++) {
        const int64_t limit = slot_tokens(e->pager, e->graph.steps[i].layer);
        tokens              = limit < tokens ? limit : tokens;
    }
    return tokens;
}

// ---- life ----

// Device memory for slot ids and scale scratch, for the largest step that goes through slots.
static bool alloc_device(struct tsg_engine * e) {
    const struct tsg_pager * pager  = e->pager;
    const int64_t            tokens = pager->inner_is_cpu ? CPU_SLOT_TOKENS : TSG_DECODE_TOKENS;
    int64_t n_used = 1, n_slots[TSG_MAX_PARTS] = { 0 };
    for (int32_t i = 0; i < pager->n_pools; i++) {
        const struct tsg_pool * pool = &pager->pools[i];
        n_used                       = pool->max_used > n_used ? pool->max_used : n_used;
        for (int32_t p = 0; p < pool->n_parts; p++) {
            n_slots[p] = pool->scale[p] && pool->scale[p]->ne[0] > n_slots[p] ? pool->scale[p]->ne[0] : n_slots[p];
        }
    }
    e->ctx      = ggml_init((struct ggml_init_params) { .mem_size = ggml_tensor_overhead() * (1 + TSG_MAX_PARTS), .no_alloc = true });
    e->slot_ids = ggml_new_tensor_2d(e->ctx, GGML_TYPE_I32, n_used, tokens);
    for (int32_t p = 0; p < TSG_MAX_PARTS; p++) {
        e->repeats[p] = n_slots[p] ? ggml_new_tensor_2d(e->ctx, GGML_TYPE_F32, n_slots[p], tokens) : NULL;
    }
    e->buffer = ggml_backend_alloc_ctx_tensors_from_buft(e->ctx, ggml_backend_get_default_buffer_type(e->inner));
    return e->buffer != NULL;
}

struct tsg_engine * tsg_engine_new(struct tsg_pager * pager, ggml_backend_t inner) {
    struct tsg_engine * e = calloc(1, sizeof(struct tsg_engine));
    if (e) {
        e->pager = pager;
        e->inner = inner;
        if (!alloc_device(e) || !tsg_resident_engine_init(e)) {
            tsg_engine_free(e);
            return NULL;
        }
    }
    return e;
}

void tsg_engine_free(struct tsg_engine * e) {
    mtx_lock(&e->pager->lock);
    if (e->pager->active == e) {
        ggml_backend_synchronize(e->inner);
        e->pager->active = NULL;
    }
    tsg_admit_settle(e->pager);
    tsg_resident_engine_free(e);
    tsg_corun_free(e);
    mtx_unlock(&e->pager->lock);
    tsg_graph_free(&e->graph);
    ggml_backend_buffer_free(e->buffer);
    ggml_backend_buffer_free(e->host);
    ggml_free(e->ctx);
    free(e);
}

void tsg_engine_wait(struct tsg_pager * pager) {
    if (pager->active) {
        ggml_backend_synchronize(pager->active->inner);
        tsg_resident_engine_wait(pager->active);
    }
}

// ---- the router's choice ----

static bool reserve_ids(struct tsg_engine * e, size_t n) {
    if (n <= e->ids_cap) {
        return true;
    }
    bool pinned;
    ggml_backend_synchronize(e->inner);  // the old staging may still be read
    ggml_backend_buffer_free(e->host);
    e->host    = tsg_host_alloc(e->pager, 2 * n * sizeof(int32_t), &pinned);
    e->ids_cap = e->host ? n : 0;
    if (!e->host) {
        tsg_fail(TSG_E_MEMORY, "no host memory for the ids of %zu routed experts", n);
        return false;
    }
    e->ids       = ggml_backend_buffer_get_base(e->host);
    e->slot_rows = e->ids + n;
    return true;
}

static void name_globally(struct tsg_engine * e, const struct tsg_step * step) {
    for (int32_t i = 0; i < e->n_distinct; i++) {
        e->global[i] = step->layer->first + e->distinct[i];
    }
}

// Reads the ids of a step and lists the distinct experts in ascending order, as resident.cu does.
bool tsg_engine_read_ids(struct tsg_engine * e, const struct tsg_step * step) {
    const struct ggml_tensor * ids = step->ids;
    const int64_t n_used = ids->ne[0], n_tokens = ids->ne[1];
    const size_t  n = (size_t) (n_used * n_tokens);
    if (!reserve_ids(e, n)) {
        return false;
    }
    ggml_backend_tensor_get_2d_async(e->inner, ids, e->ids, 0, (size_t) n_used * sizeof(int32_t), (size_t) n_tokens, ids->nb[1],
                                     (size_t) n_used * sizeof(int32_t));
    const uint64_t start = tsg_nanoseconds();
    ggml_backend_synchronize(e->inner);
    e->pager->notes.wait_device_ns += tsg_nanoseconds() - start;

    const int32_t n_expert = step->layer->n_expert;
    memset(e->count, 0, sizeof(int32_t) * (size_t) n_expert);
    for (size_t i = 0; i < n; i++) {
        if (e->ids[i] < 0 || e->ids[i] >= n_expert) {
            tsg_fail(TSG_E_STATE, "the router of %s chose expert %d of %d", step->layer->weight[0].name, e->ids[i], n_expert);
            return false;
        }
        e->count[e->ids[i]]++;
    }
    e->n_distinct = 0;
    for (int32_t x = 0; x < n_expert; x++) {
        if (e->count[x]) {
            e->distinct[e->n_distinct++] = x;
        }
    }
    name_globally(e, step);
    return true;
}

// ---- one step ----

struct tsg_pool * tsg_engine_pool(struct tsg_engine * e, const struct tsg_step * step) {
    return &e->pager->pools[step->layer->pool];
}

static void load_misses(struct tsg_engine * e, const struct tsg_step * step, int32_t n_loads, struct tsg_counts * counts) {
    for (int32_t i = 0; i < n_loads; i++) {
        tsg_pool_load_slot(tsg_engine_pool(e, step), e->inner, step->layer, e->loads[i].expert - step->layer->first, e->loads[i].slot);
    }
    counts->bytes_link += (uint64_t) n_loads * tsg_layer_expert_bytes(step->layer);
}

void tsg_engine_shape_ids(struct tsg_engine * e, const struct tsg_step * step) {
    struct ggml_tensor * t = e->slot_ids;
    t->ne[0] = step->ids->ne[0];
    t->ne[1] = step->ids->ne[1];
    t->nb[1] = (size_t) t->ne[0] * sizeof(int32_t);
    t->nb[2] = t->nb[3] = (size_t) (t->ne[0] * t->ne[1]) * sizeof(int32_t);
}

bool tsg_engine_use_slots(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step) {
    const int64_t n_used = step->ids->ne[0], n_tokens = step->ids->ne[1];
    for (int32_t i = 0; i < e->n_distinct; i++) {
        e->slot_of[e->distinct[i]] = e->slot[i];
    }
    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        e->slot_rows[i] = e->slot_of[e->ids[i]];
    }
    tsg_engine_shape_ids(e, step);
    ggml_backend_tensor_set_async(e->inner, e->slot_ids, e->slot_rows, 0, e->slot_ids->nb[2]);
    return tsg_graph_use_slots(&e->graph, graph, step, tsg_engine_pool(e, step), e->slot_ids, e->repeats);
}

static bool run_in_stage(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, struct tsg_counts * counts) {
    struct tsg_pool * pool  = tsg_engine_pool(e, step);
    size_t            bytes = 0;
    pool->held[0] = NULL;
    for (int32_t p = 0; p < pool->n_parts; p++) {
        bytes += step->layer->weight[p].bytes;
        pool->stage[0][p]->ne[2] = step->layer->n_expert;
    }
    for (int32_t i = 0; i < e->n_distinct; i++) {
        if (e->slot[i] >= 0) {
            tsg_pool_slot_to_stage(pool, e->inner, e->slot[i], e->distinct[i]);
            counts->bytes_device += bytes;
        } else {
            tsg_pool_load_stage(pool, e->inner, step->layer, e->distinct[i], 0);
            counts->bytes_link += bytes;
        }
    }
    counts->streamed++;
    return tsg_graph_use_experts(&e->graph, graph, step, pool->stage[0]);
}

static int ascending(const void * a, const void * b) {
    const int32_t x = *(const int32_t *) a, y = *(const int32_t *) b;
    return (x > y) - (x < y);
}

// For a long prompt that may leave some experts in free slots: those that most of its tokens want.
static void most_wanted_first(struct tsg_engine * e, const struct tsg_step * step) {
    int32_t * rank = e->global;  // expert and its count in one number that qsort can order
    for (int32_t i = 0; i < e->n_distinct; i++) {
        const int32_t count = e->count[e->distinct[i]];
        rank[i]             = e->distinct[i] - TSG_MAX_EXPERTS * (count < (1 << 18) ? count : 1 << 18);
    }
    qsort(rank, (size_t) e->n_distinct, sizeof(int32_t), ascending);
    for (int32_t i = 0; i < e->n_distinct; i++) {
        e->distinct[i] = ((rank[i] % TSG_MAX_EXPERTS) + TSG_MAX_EXPERTS) % TSG_MAX_EXPERTS;
    }
    name_globally(e, step);
}

// How many more of this layer's experts a long prompt may leave in free slots: an equal share for each layer, so that the first do not take them all.
static int32_t fair_share(const struct tsg_engine * e, const struct tsg_step * step) {
    const struct tsg_pool * pool  = &e->pager->pools[step->layer->pool];
    int32_t                 share = (pool->n_slots + pool->n_layers - 1) / pool->n_layers;
    for (int32_t x = 0; x < step->layer->n_expert; x++) {
        share -= pool->slots.slot_of[step->layer->first + x] >= 0;
    }
    return share > 0 ? share : 0;
}

bool tsg_engine_run_step(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, enum tsg_phase phase) {
    struct tsg_pool *   pool   = tsg_engine_pool(e, step);
    struct tsg_counts * counts = &e->pager->counts[phase];
    tsg_admit_settle(e->pager);  // here an expert that has a slot is in it
    if (!tsg_engine_read_ids(e, step)) {
        return false;
    }
    const bool fits_slots = step->ids->ne[1] <= slot_tokens(e->pager, step->layer);
    const bool few        = (int64_t) e->n_distinct * pool->n_layers <= pool->n_slots;  // a layer's share: through the cache, like decode
    int32_t    n_loads    = -1;
    if (fits_slots || few) {
        n_loads = tsg_slots_acquire(&pool->slots, e->global, e->n_distinct, phase, TSG_ADMIT_ALL, 0, e->slot, e->loads, counts);
    }
    if (n_loads >= 0) {
        tsg_profile_mark(e, step->layer->index, TSG_LOOKUP);
        load_misses(e, step, n_loads, counts);
        tsg_profile_mark(e, step->layer->index, TSG_COPY);
        return fits_slots ? tsg_engine_use_slots(e, graph, step) : run_in_stage(e, graph, step, counts);
    }
    most_wanted_first(e, step);
    n_loads = tsg_slots_acquire(&pool->slots, e->global, e->n_distinct, phase, TSG_ADMIT_FREE, fair_share(e, step), e->slot, e->loads, counts);
    if (n_loads < 0) {
        tsg_fail(TSG_E_MEMORY, "no memory for the bookkeeping of a layer");
        return false;
    }
    load_misses(e, step, n_loads, counts);
    return run_in_stage(e, graph, step, counts);
}

// ---- a graph ----

enum ggml_status tsg_engine_compute_range(struct tsg_engine * e, struct ggml_cgraph * graph, int from, int to) {
    if (from == to) {
        return GGML_STATUS_SUCCESS;
    }
    if (from == 0 && to == graph->n_nodes && !tsg_layers_are_placed(e->pager)) {
        return ggml_backend_graph_compute_async(e->inner, graph);  // whole, with its uid: the device may replay it
    }
    struct ggml_cgraph view = ggml_graph_view(graph, from, to);
    return ggml_backend_graph_compute_async(e->inner, &view);
}

enum ggml_status tsg_engine_compute_plain(struct tsg_engine * e, struct ggml_cgraph * graph, int from, int to) {
    if (from == to) {
        return GGML_STATUS_SUCCESS;
    }
    struct ggml_cgraph   view  = ggml_graph_view(graph, from, to);
    struct ggml_tensor * first = view.nodes[0];
    e->flip++;
    memcpy(first->padding, &e->flip, sizeof(first->padding));
    return ggml_backend_graph_compute_async(e->inner, &view);
}

// Where all experts of the layer lie in slots in order: that part of them, ids untouched.
bool tsg_engine_use_resident(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, struct tsg_counts * counts) {
    struct ggml_tensor * weights[TSG_MAX_PARTS];
    for (int32_t p = 0; p < TSG_MAX_PARTS; p++) {
        weights[p] = &step->layer->resident[p];
    }
    const uint64_t rows = (uint64_t) ggml_nelements(step->ids);
    counts->lookups += rows;
    counts->hits    += rows;
    return tsg_graph_use_experts(&e->graph, graph, step, weights);
}

static enum ggml_status host_driven(struct tsg_engine * e, struct ggml_cgraph * graph, enum tsg_phase phase) {
    int done = 0;
    tsg_profile_start(e, phase);
    for (int i = 0; i < e->graph.n_steps; i++) {
        const struct tsg_step * step = &e->graph.steps[i];
        if (tsg_layer_is_resident(e->pager, step->layer)) {
            if (!tsg_engine_use_resident(e, graph, step, &e->pager->counts[phase])) {
                return GGML_STATUS_ALLOC_FAILED;
            }
            continue;
        }
        if (phase == TSG_DECODE && step->layer->stage >= 0) {
            const enum ggml_status status = tsg_layers_use_stage(e, graph, step, &done);
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
            continue;
        }
        if (ggml_nelements(step->ids) == 0) {
            continue;  // no token asks for logits: the nodes are empty, no backend looks at their weights
        }
        const enum ggml_status status = tsg_engine_compute_range(e, graph, done, step->first);
        done                          = step->first;
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        tsg_profile_mark(e, step->layer->index, TSG_ATTENTION);
        const bool on_both = phase == TSG_DECODE && tsg_coexec_can(e, step);
        if (on_both ? !tsg_coexec_step(e, graph, step, &done) : !tsg_engine_run_step(e, graph, step, phase)) {
            ggml_log_internal(GGML_LOG_LEVEL_ERROR, "tinyserve: %s\n", tsg_last_error());
            return GGML_STATUS_FAILED;
        }
        if (e->timing) {
            const int end = step->done > done ? step->done : done;
            if (tsg_engine_compute_range(e, graph, done, end) != GGML_STATUS_SUCCESS) {
                return GGML_STATUS_FAILED;
            }
            done = end;
            tsg_profile_mark(e, step->layer->index, TSG_EXPERTS);
        }
    }
    const enum ggml_status status = tsg_engine_compute_range(e, graph, done, graph->n_nodes);
    tsg_profile_mark(e, e->pager->n_layers, TSG_ATTENTION);
    return status;
}

static bool all_resident(struct tsg_engine * e) {
    for (int i = 0; i < e->graph.n_steps; i++) {
        if (!tsg_engine_pool(e, &e->graph.steps[i])->resident) {
            return false;
        }
    }
    return true;
}

// Chooses the way of a graph that has expert layers.
static enum ggml_status compute_steps(struct tsg_engine * e, struct ggml_cgraph * graph) {
    struct tsg_pager * pager    = e->pager;
    int64_t            n_tokens = 0;
    for (int i = 0; i < e->graph.n_steps; i++) {  // the last layer may see fewer: only tokens whose logits are wanted
        n_tokens = e->graph.steps[i].ids->ne[1] > n_tokens ? e->graph.steps[i].ids->ne[1] : n_tokens;
    }
    const enum tsg_phase phase = n_tokens <= TSG_DECODE_TOKENS ? TSG_DECODE : TSG_PREFILL;
    pager->counts[phase].graphs++;
    if (all_resident(e)) {
        return host_driven(e, graph, phase);
    }
    const bool on_both = phase == TSG_DECODE && tsg_coexec_on(pager);
    if (!on_both) {
        tsg_admit_settle(pager);
    }
    if (!on_both && tsg_resident_can(e, n_tokens)) {
        return tsg_resident_decode(e, graph);
    }
    tsg_resident_to_host(pager);
    if (on_both) {
        tsg_admit_poll(pager);
    }
    if (phase == TSG_PREFILL && tsg_stream_can(e)) {
        return tsg_stream_prefill(e, graph, &pager->counts[phase]);
    }
    return host_driven(e, graph, phase);
}

enum ggml_status tsg_engine_compute(struct tsg_engine * e, struct ggml_cgraph * graph) {
    struct tsg_pager * pager  = e->pager;
    enum ggml_status   status = GGML_STATUS_FAILED;
    mtx_lock(&pager->lock);
    const uint64_t start = tsg_nanoseconds();
    e->n_graphs++;
    if (pager->active != e) {
        tsg_engine_wait(pager);
        pager->active = e;
    }
    if (!tsg_coexec_on(pager) && tsg_resident_replay(e, graph)) {
        status = GGML_STATUS_SUCCESS;
        pager->notes.host_ns += tsg_nanoseconds() - start;
    } else if (tsg_graph_scan(&e->graph, pager, graph)) {
        status = e->graph.n_steps == 0 ? ggml_backend_graph_compute_async(e->inner, graph) : compute_steps(e, graph);
        tsg_graph_restore(&e->graph);
    }
    mtx_unlock(&pager->lock);
    return status;
}
