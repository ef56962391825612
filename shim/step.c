// step.c - one step of the host-driven engine: the router's choice is read, missing experts are brought, and the nodes are pointed at slots or at a stage.
#include "engine.h"

#include <stdlib.h>
#include <string.h>

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
    const bool fits_slots = step->ids->ne[1] <= tsg_engine_step_tokens(e, step);
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
