// layers.c - whole layers: the placement of llama.cpp's --n-cpu-moe inside the pools.
//
// The experts of a pool's last layers lie in its last slots, in the model's own order, and stay there: their matmuls keep the router's ids, and the graph is
// not cut for them. The layers before those have the prefill stages while decode runs: what a prompt overwrites there is brought back by the next token.
// With both, as many layers are on the device as llama.cpp has there in the same memory. The CPU computes the experts of the others, as it does misses,
// except those in the slots that are left over.
#include "engine.h"

#include <stdlib.h>
#include <string.h>

static int32_t pinned_before(const struct tsg_slots * slots, int32_t expert) {
    int32_t n = 0;
    for (int32_t x = 0; x < expert; x++) {
        n += slots->pinned[x];
    }
    return n;
}

// Index of the first of the pool's last layers that fit into its slots, beside the pinned experts of those before; n_layers = none does.
static int32_t first_whole(const struct tsg_pager * pager, int32_t pool) {
    const struct tsg_pool * p = &pager->pools[pool];
    int32_t first = pager->n_layers, n = 0;
    for (int32_t i = pager->n_layers - 1; i >= 0; i--) {
        const struct tsg_layer * layer = pager->layers[i];
        if (layer->pool != pool) {
            continue;
        }
        n += layer->n_expert;
        if (n + pinned_before(&p->slots, layer->first) > p->n_slots) {
            break;
        }
        first = i;
    }
    return first;
}

static void lend_stages(struct tsg_pager * pager, int32_t pool, int32_t first) {
    struct tsg_pool * p = &pager->pools[pool];
    int32_t           k = 0;
    for (int32_t i = first - 1; i >= 0 && k < p->n_stages; i--) {
        if (pager->layers[i]->pool == pool) {
            p->held[k]               = NULL;
            pager->layers[i]->stage = k++;
        }
    }
}

static void bring(struct tsg_pager * pager, int32_t pool, int32_t expert, int32_t slot) {
    const struct tsg_layer * layer = tsg_layer_of(pager, pool, expert);
    tsg_slots_put(&pager->pools[pool].slots, expert, slot);
    tsg_pool_load_slot(&pager->pools[pool], NULL, layer, expert - layer->first, slot);
    pager->counts[TSG_DECODE].bytes_link += tsg_layer_expert_bytes(layer);
}

// A slot below n_open for a pinned expert that had to leave: first_whole() has seen to it that there is one.
static void bring_pinned(struct tsg_pager * pager, int32_t pool, int32_t expert) {
    struct tsg_slots * slots = &pager->pools[pool].slots;
    for (int32_t s = 0; s < slots->n_open; s++) {
        if (slots->expert_in[s] < 0 || !slots->pinned[slots->expert_in[s]]) {
            tsg_slots_clear(slots, s);
            bring(pager, pool, expert, s);
            return;
        }
    }
}

static void place(struct tsg_pager * pager, int32_t pool) {
    struct tsg_pool *  p     = &pager->pools[pool];
    struct tsg_slots * slots = &p->slots;
    const int32_t      from  = first_whole(pager, pool);
    const int32_t      id    = from < pager->n_layers ? pager->layers[from]->first : p->n_experts;
    memcpy(p->before, slots->expert_in, sizeof(int32_t) * (size_t) p->n_slots);
    slots->n_open = p->n_slots - (p->n_experts - id);
    for (int32_t x = id; x < p->n_experts; x++) {
        const int32_t slot = slots->n_open + x - id;
        if (slots->slot_of[x] != slot) {
            tsg_slots_clear(slots, slot);
            bring(pager, pool, x, slot);
        }
    }
    for (int32_t x = 0; x < id; x++) {
        if (slots->pinned[x] && slots->slot_of[x] < 0) {
            bring_pinned(pager, pool, x);
        }
    }
    for (int32_t i = from; i < pager->n_layers; i++) {
        struct tsg_layer * layer = pager->layers[i];
        layer->whole             = layer->pool == pool;
        for (int32_t k = 0; k < layer->n_parts && layer->whole; k++) {
            tsg_pool_view(&layer->resident[k], p->slot[k], slots->n_open + layer->first - id, layer->n_expert);
        }
    }
    lend_stages(pager, pool, from);
}

bool tsg_layers_place(struct tsg_pager * pager) {
    for (int32_t i = 0; i < pager->n_pools; i++) {
        struct tsg_pool * p = &pager->pools[i];
        if (!p->resident && !p->before && !(p->before = malloc(sizeof(int32_t) * (size_t) p->n_slots))) {
            tsg_layers_release(pager, false);
            tsg_fail(TSG_E_MEMORY, "no memory for the bookkeeping of whole layers");
            return false;
        }
    }
    for (int32_t i = 0; i < pager->n_pools; i++) {
        if (!pager->pools[i].resident) {
            place(pager, i);
        }
    }
    return true;
}

// Back to what lay there, where nothing was pinned meanwhile.
static void restore_slots(struct tsg_pager * pager, int32_t pool) {
    struct tsg_pool *  p     = &pager->pools[pool];
    struct tsg_slots * slots = &p->slots;
    for (int32_t s = 0; s < p->n_slots; s++) {
        const int32_t x = slots->expert_in[s];
        if (x >= 0 && x != p->before[s] && !slots->pinned[x]) {
            tsg_slots_clear(slots, s);
        }
    }
    for (int32_t s = 0; s < p->n_slots; s++) {
        if (p->before[s] >= 0 && slots->expert_in[s] < 0 && slots->slot_of[p->before[s]] < 0) {
            bring(pager, pool, p->before[s], s);
        }
    }
}

void tsg_layers_release(struct tsg_pager * pager, bool restore) {
    for (int32_t i = 0; i < pager->n_pools; i++) {
        struct tsg_pool * p = &pager->pools[i];
        if (!p->before) {
            continue;
        }
        p->slots.n_open = p->n_slots;
        if (restore) {
            restore_slots(pager, i);
        }
        free(p->before);
        p->before = NULL;
    }
    for (int32_t i = 0; i < pager->n_layers; i++) {
        pager->layers[i]->whole = false;
        pager->layers[i]->stage = -1;
    }
}

// The whole layer into its stage. What has been patched so far may read there, and is handed to the device first: copies follow it on the same stream.
static enum ggml_status fill_stage(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, int * done) {
    const struct tsg_layer * layer  = step->layer;
    struct tsg_pool *        pool   = tsg_engine_pool(e, step);
    const enum ggml_status   status = tsg_engine_compute_range(e, graph, *done, step->first);
    *done = step->first;
    for (int32_t x = 0; x < layer->n_expert && status == GGML_STATUS_SUCCESS; x++) {
        tsg_pool_load_stage(pool, e->inner, layer, x, layer->stage);
        e->pager->counts[TSG_DECODE].bytes_link += tsg_layer_expert_bytes(layer);
    }
    pool->held[layer->stage] = status == GGML_STATUS_SUCCESS ? layer : NULL;
    return status;
}

enum ggml_status tsg_layers_use_stage(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, int * done) {
    const struct tsg_layer * layer  = step->layer;
    struct tsg_pool *        pool   = tsg_engine_pool(e, step);
    struct tsg_counts *      counts = &e->pager->counts[TSG_DECODE];
    const uint64_t           rows   = (uint64_t) ggml_nelements(step->ids);
    const enum ggml_status   status = pool->held[layer->stage] == layer ? GGML_STATUS_SUCCESS : fill_stage(e, graph, step, done);
    if (status != GGML_STATUS_SUCCESS) {
        return status;
    }
    for (int32_t p = 0; p < pool->n_parts; p++) {
        pool->stage[layer->stage][p]->ne[2] = layer->n_expert;
    }
    counts->lookups += rows;
    counts->hits    += rows;
    return tsg_graph_use_experts(&e->graph, graph, step, pool->stage[layer->stage]) ? GGML_STATUS_SUCCESS : GGML_STATUS_ALLOC_FAILED;
}

bool tsg_layers_are_placed(const struct tsg_pager * pager) {
    bool placed = false;
    for (int32_t i = 0; i < pager->n_pools; i++) {
        placed |= pager->pools[i].before != NULL;
    }
    return placed;
}

void tsg_layers_count(const struct tsg_pager * pager, int32_t * on_device, int32_t * all) {
    *on_device = *all = 0;
    for (int32_t i = 0; i < pager->n_layers; i++) {
        const struct tsg_layer * layer = pager->layers[i];
        *all       += !pager->pools[layer->pool].resident;
        *on_device += layer->whole || layer->stage >= 0;
    }
}
