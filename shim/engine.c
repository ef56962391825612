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
            const int64_t most = pool->scale[p] ? pool->n_experts + 1 : 0;  // slots of the largest size, and the zeros for the CPU's part
            n_slots[p]         = most > n_slots[p] ? most : n_slots[p];
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
    if (!e) {
        return NULL;
    }
    e->pager = pager;
    e->inner = inner;
    tsg_pager_lock(pager);
    const bool ok  = alloc_device(e) && tsg_resident_engine_init(e);
    e->next        = pager->engines;
    pager->engines = e;
    tsg_pager_unlock(pager);
    if (!ok) {
        tsg_engine_free(e);
        return NULL;
    }
    return e;
}

static void leave_pager(struct tsg_engine * e) {
    struct tsg_engine ** at = &e->pager->engines;
    while (*at != e) {
        at = &(*at)->next;
    }
    *at = e->next;
}

void tsg_engine_free(struct tsg_engine * e) {
    tsg_pager_lock(e->pager);
    leave_pager(e);
    if (e->pager->active == e) {
        ggml_backend_synchronize(e->inner);
        e->pager->active = NULL;
    }
    tsg_admit_settle(e->pager);
    tsg_resident_engine_free(e);
    tsg_corun_free(e);
    tsg_pager_unlock(e->pager);
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

// ---- a graph ----

enum ggml_status tsg_engine_compute_range(struct tsg_engine * e, struct ggml_cgraph * graph, int from, int to) {
    if (from == to) {
        return GGML_STATUS_SUCCESS;
    }
    if (from == 0 && to == graph->n_nodes && !tsg_layers_are_placed(e->pager)) {  // whole, with a uid: the device may replay it, as long as the pools lie where they lay
        struct ggml_cgraph whole = *graph;
        whole.uid                = graph->uid ? graph->uid ^ e->pager->n_resized << 48 : 0;
        return ggml_backend_graph_compute_async(e->inner, &whole);
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
static bool use_resident(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, struct tsg_counts * counts) {
    struct ggml_tensor * weights[TSG_MAX_PARTS];
    for (int32_t p = 0; p < TSG_MAX_PARTS; p++) {
        weights[p] = &step->layer->resident[p];
    }
    const uint64_t rows = (uint64_t) ggml_nelements(step->ids);
    counts->lookups += rows;
    counts->hits    += rows;
    return tsg_graph_use_experts(&e->graph, graph, step, weights);
}

bool tsg_engine_use_resident(struct tsg_engine * e, struct ggml_cgraph * graph, struct tsg_counts * counts) {
    for (int i = 0; i < e->graph.n_steps; i++) {
        const struct tsg_step * step = &e->graph.steps[i];
        if (tsg_layer_is_resident(e->pager, step->layer) && !use_resident(e, graph, step, counts)) {
            return false;
        }
    }
    return true;
}

// Not where all are there, nor where no token asks for logits: then the nodes are empty, and no backend looks at their weights.
bool tsg_engine_brings(const struct tsg_engine * e, const struct tsg_step * step) {
    return !tsg_layer_is_resident(e->pager, step->layer) && ggml_nelements(step->ids) > 0;
}

static enum ggml_status host_driven(struct tsg_engine * e, struct ggml_cgraph * graph, enum tsg_phase phase) {
    int done = 0;
    tsg_profile_start(e, phase);
    if (!tsg_engine_use_resident(e, graph, &e->pager->counts[phase])) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    for (int i = 0; i < e->graph.n_steps; i++) {
        const struct tsg_step * step = &e->graph.steps[i];
        if (!tsg_engine_brings(e, step)) {
            continue;
        }
        if (phase == TSG_DECODE && step->layer->stage >= 0) {
            const enum ggml_status status = tsg_layers_use_stage(e, graph, step, &done);
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
            continue;
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
    tsg_pager_lock(pager);
    if (pager->broken) {
        tsg_pager_unlock(pager);
        ggml_log_internal(GGML_LOG_LEVEL_ERROR, "tinyserve: the expert cache was lost when its size was changed: load the model again\n");
        return GGML_STATUS_FAILED;
    }
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
    tsg_pager_unlock(pager);
    return status;
}
