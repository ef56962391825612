// experts.c - counters, and single experts by hand: look, pin, prefetch, evict.
#include "coexec.h"

#include <string.h>

// ---- counters ----

void tsg_pager_stats(struct tsg_pager * pager, struct tsg_stats * out) {
    tsg_pager_lock(pager);
    *out = (struct tsg_stats) {
        .phase         = { pager->counts[0], pager->counts[1] },
        .host_rung     = pager->host.rung,
        .all_resident  = pager->n_pools > 0,
        .notes         = pager->notes,
        .cpu_cannot    = pager->coexec.cannot,
        .device_engine = pager->resident != NULL && !tsg_coexec_on(pager),
    };
    tsg_resident_add_counts(pager, &out->phase[TSG_DECODE]);
    for (int32_t i = 0; i < pager->n_layers; i++) {
        for (int32_t p = 0; p < pager->layers[i]->n_parts; p++) {
            out->host_bytes   += pager->layers[i]->weight[p].arrived;
            out->host_tensors += pager->layers[i]->weight[p].arrived > 0;
        }
    }
    for (int32_t i = 0; i < pager->n_pools; i++) {
        const struct tsg_pool * pool = &pager->pools[i];
        out->pool_bytes   += pool->buffer ? ggml_backend_buffer_get_size(pool->buffer) : 0;
        out->stage_bytes  += pool->stage_buffer ? ggml_backend_buffer_get_size(pool->stage_buffer) : 0;
        out->slots_total  += pool->slots.n_slots;
        out->slots_used   += pool->slots.n_used;
        out->all_resident &= pool->resident;
    }
    tsg_pager_unlock(pager);
}

void tsg_pager_reset_stats(struct tsg_pager * pager) {
    tsg_pager_lock(pager);
    tsg_resident_to_host(pager);
    tsg_resident_reset_counts(pager);
    memset(pager->counts, 0, sizeof(pager->counts));
    pager->notes = (struct tsg_notes) { 0 };
    for (int32_t i = 0; i < pager->n_pools && pager->committed; i++) {
        struct tsg_slots * slots = &pager->pools[i].slots;
        memset(slots->hits, 0, sizeof(uint64_t) * (size_t) slots->n_experts);
        memset(slots->misses, 0, sizeof(uint64_t) * (size_t) slots->n_experts);
        memset(slots->prefill, 0, sizeof(uint64_t) * (size_t) slots->n_experts);
    }
    tsg_pager_unlock(pager);
}

enum tsg_status tsg_pager_set_policy(struct tsg_pager * pager, enum tsg_policy policy) {
    if (policy < TSG_POLICY_LFRU || policy > TSG_POLICY_FIFO) {
        return tsg_fail(TSG_E_ARGUMENT, "there is no policy %d", (int) policy);
    }
    tsg_pager_lock(pager);
    tsg_resident_to_host(pager);
    pager->policy = policy;
    for (int32_t i = 0; i < pager->n_pools; i++) {
        tsg_slots_set_policy(&pager->pools[i].slots, policy);
    }
    tsg_pager_unlock(pager);
    return TSG_OK;
}

enum tsg_status tsg_pager_check_integrity(struct tsg_pager * pager) {
    const char * wrong = NULL;
    tsg_pager_lock(pager);
    tsg_resident_to_host(pager);
    for (int32_t i = 0; i < pager->n_pools && !wrong; i++) {
        wrong = tsg_slots_check(&pager->pools[i].slots);
    }
    for (int phase = 0; phase < 2 && !wrong; phase++) {
        struct tsg_counts c = pager->counts[phase];
        if (phase == TSG_DECODE) {
            tsg_resident_add_counts(pager, &c);
        }
        wrong = c.hits + c.misses != c.lookups ? "hits and misses do not add up to lookups" : NULL;
    }
    tsg_pager_unlock(pager);
    return wrong ? tsg_fail(TSG_E_STATE, "%s", wrong) : TSG_OK;
}

// ---- one expert ----

// The layer, or NULL (and an error) if there is no such layer, expert or part.
static struct tsg_layer * find(struct tsg_pager * pager, int32_t layer, int32_t expert, int32_t part) {
    if (layer < 0 || layer >= pager->n_layers || expert < 0 || expert >= pager->layers[layer]->n_expert || part < 0 ||
        part >= pager->layers[layer]->n_parts) {
        tsg_fail(TSG_E_ARGUMENT, "there is no weight %d of expert %d in layer %d", part, expert, layer);
        return NULL;
    }
    return pager->layers[layer];
}

// The same, once there are slots (and, to change them, something to load from). On TSG_OK the pager is locked and the host has the slot maps.
static enum tsg_status enter(struct tsg_pager * pager, bool there, int32_t layer, int32_t expert, int32_t part, struct tsg_layer ** out) {
    *out = find(pager, layer, expert, part);
    if (!*out) {
        return TSG_E_ARGUMENT;
    }
    if (!there) {
        return tsg_fail(TSG_E_STATE, "the model is not loaded");
    }
    tsg_pager_lock(pager);
    tsg_admit_settle(pager);
    tsg_resident_to_host(pager);
    return TSG_OK;
}

// For the return value of those who entered.
static enum tsg_status leave(struct tsg_pager * pager, enum tsg_status status) {
    tsg_pager_unlock(pager);
    return status;
}

// In graphs: a pool has `period` ticks in each, and the first step is tick 2.
static uint64_t graph_of(const struct tsg_slots * slots, uint64_t tick) {
    return tick > 1 ? 1 + (tick - 2) / slots->period : 0;
}

static struct tsg_expert describe(const struct tsg_slots * slots, int32_t id) {
    return (struct tsg_expert) {
        .slot     = slots->slot_of[id],
        .pinned   = slots->pinned[id],
        .hits     = slots->hits[id],
        .misses   = slots->misses[id],
        .uses     = slots->hits[id] + slots->misses[id] - slots->prefill[id],
        .last_use = graph_of(slots, slots->use[id].last),
    };
}

enum tsg_status tsg_expert_get(struct tsg_pager * pager, int32_t layer, int32_t expert, struct tsg_expert * out) {
    struct tsg_layer *    l;
    const enum tsg_status entered = enter(pager, pager->committed, layer, expert, 0, &l);
    if (entered != TSG_OK) {
        return entered;
    }
    *out = describe(&pager->pools[l->pool].slots, l->first + expert);
    return leave(pager, TSG_OK);
}

enum tsg_status tsg_expert_get_layer(struct tsg_pager * pager, int32_t layer, struct tsg_expert * out) {
    struct tsg_layer *    l;
    const enum tsg_status entered = enter(pager, pager->committed, layer, 0, 0, &l);
    if (entered != TSG_OK) {
        return entered;
    }
    for (int32_t e = 0; e < l->n_expert; e++) {
        out[e] = describe(&pager->pools[l->pool].slots, l->first + e);
    }
    return leave(pager, TSG_OK);
}

enum tsg_status tsg_pager_map(struct tsg_pager * pager, struct tsg_map * out, uint8_t * resident, uint64_t * hits, uint64_t * misses, uint64_t * last_use) {
    if (!pager->committed) {
        return tsg_fail(TSG_E_STATE, "the model is not loaded");
    }
    tsg_pager_lock(pager);
    tsg_resident_look(pager);
    *out = (struct tsg_map) { .phase = { pager->counts[0], pager->counts[1] }, .all_resident = true };
    tsg_resident_add_counts(pager, &out->phase[TSG_DECODE]);
    for (int32_t i = 0; i < pager->n_pools; i++) {
        const struct tsg_slots * slots = &pager->pools[i].slots;
        const uint64_t           tick  = graph_of(slots, slots->clock);
        out->tick          = tick > out->tick ? tick : out->tick;
        out->slots_total  += slots->n_slots;
        out->slots_used   += slots->n_used;
        out->all_resident &= pager->pools[i].resident;
    }
    for (int32_t i = 0, at = 0; i < pager->n_layers; i++) {
        const struct tsg_layer * layer = pager->layers[i];
        const struct tsg_slots * slots = &pager->pools[layer->pool].slots;
        for (int32_t e = 0; e < layer->n_expert; e++, at++) {
            const struct tsg_expert x = describe(slots, layer->first + e);
            resident[at]            = x.slot >= 0;
            hits[at]                = x.hits;
            misses[at]              = x.misses;
            last_use[at]            = x.last_use;
        }
    }
    tsg_pager_unlock(pager);
    return TSG_OK;
}

enum tsg_status tsg_expert_host(struct tsg_pager * pager, int32_t layer, int32_t expert, int32_t part, const void ** data, size_t * size) {
    struct tsg_layer * l = find(pager, layer, expert, part);
    if (!l) {
        return TSG_E_ARGUMENT;
    }
    const struct tsg_weight * w = &l->weight[part];
    if (!w->host) {
        return tsg_fail(TSG_E_STATE, "%s is not loaded", w->name);
    }
    *data = w->host + (size_t) expert * w->bytes;
    *size = w->bytes;
    return TSG_OK;
}

enum tsg_status tsg_expert_read_slot(struct tsg_pager * pager, int32_t layer, int32_t expert, int32_t part, void * data, size_t size) {
    struct tsg_layer *    l;
    const enum tsg_status entered = enter(pager, pager->ready, layer, expert, part, &l);
    if (entered != TSG_OK) {
        return entered;
    }
    const struct tsg_weight * w    = &l->weight[part];
    const struct tsg_pool *   pool = &pager->pools[l->pool];
    const int32_t             slot = pool->slots.slot_of[l->first + expert];
    if (size != w->bytes) {
        return leave(pager, tsg_fail(TSG_E_ARGUMENT, "%s has %zu bytes an expert, not %zu", w->name, w->bytes, size));
    }
    if (slot < 0) {
        return leave(pager, tsg_fail(TSG_E_STATE, "expert %d of %s is in no slot", expert, w->name));
    }
    tsg_engine_wait(pager);
    ggml_backend_tensor_get(pool->slot[part], data, (size_t) slot * size, size);
    return leave(pager, TSG_OK);
}

// Makes an expert resident now; the pager is locked.
static enum tsg_status make_resident(struct tsg_pager * pager, struct tsg_layer * l, int32_t expert) {
    struct tsg_pool *   pool   = &pager->pools[l->pool];
    struct tsg_counts * counts = &pager->counts[TSG_DECODE];
    struct tsg_load     load;
    if (!tsg_slots_load(&pool->slots, l->first + expert, &load, counts)) {
        return tsg_fail(TSG_E_STATE, pool->before ? "the slots hold whole layers, as --miss layers keeps them" : "every slot is pinned: unpin an expert first");
    }
    if (load.slot >= 0) {
        tsg_engine_wait(pager);  // a kernel may still read the slot that is overwritten
        tsg_pool_load_slot(pool, NULL, l, expert, load.slot);
        counts->bytes_link += tsg_layer_expert_bytes(l);
    }
    return TSG_OK;
}

enum tsg_status tsg_expert_pin(struct tsg_pager * pager, int32_t layer, int32_t expert, bool pin) {
    struct tsg_layer *    l;
    const enum tsg_status entered = enter(pager, pager->ready, layer, expert, 0, &l);
    if (entered != TSG_OK) {
        return entered;
    }
    struct tsg_pool * pool = &pager->pools[l->pool];
    if (!pin) {
        tsg_slots_unpin(&pool->slots, l->first + expert);
        return leave(pager, TSG_OK);
    }
    enum tsg_status status = make_resident(pager, l, expert);
    if (status == TSG_OK && !tsg_slots_pin(&pool->slots, l->first + expert, pool->resident ? 0 : pool->max_used)) {
        status = tsg_fail(TSG_E_STATE, "%d of %d slots are pinned, and one token needs %d: unpin an expert first", pool->slots.n_pinned, pool->n_slots,
                          pool->max_used);
    }
    return leave(pager, status);
}

enum tsg_status tsg_expert_prefetch(struct tsg_pager * pager, int32_t layer, int32_t expert) {
    struct tsg_layer *    l;
    const enum tsg_status entered = enter(pager, pager->ready, layer, expert, 0, &l);
    if (entered != TSG_OK) {
        return entered;
    }
    return leave(pager, make_resident(pager, l, expert));
}

enum tsg_status tsg_expert_evict(struct tsg_pager * pager, int32_t layer, int32_t expert) {
    struct tsg_layer *    l;
    const enum tsg_status entered = enter(pager, pager->ready, layer, expert, 0, &l);
    if (entered != TSG_OK) {
        return entered;
    }
    struct tsg_pool * pool = &pager->pools[l->pool];
    if (pool->resident) {
        return leave(pager, tsg_fail(TSG_E_STATE, "this pool holds all its experts, none can leave"));
    }
    if (pool->slots.slot_of[l->first + expert] >= pool->slots.n_open) {
        return leave(pager, tsg_fail(TSG_E_STATE, "layer %d stays in the slots as a whole, none of its experts can leave", layer));
    }
    if (!tsg_slots_evict(&pool->slots, l->first + expert)) {
        return leave(pager, tsg_fail(TSG_E_STATE, "expert %d of layer %d is pinned: unpin it first", expert, layer));
    }
    return leave(pager, TSG_OK);
}

enum tsg_status tsg_expert_preload(struct tsg_pager * pager, int32_t layer, int32_t expert, bool * loaded) {
    struct tsg_layer *    l;
    const enum tsg_status entered = enter(pager, pager->ready, layer, expert, 0, &l);
    if (entered != TSG_OK) {
        return entered;
    }
    struct tsg_pool * pool = &pager->pools[l->pool];
    struct tsg_load   load;
    *loaded = tsg_slots_preload(&pool->slots, l->first + expert, &load);
    if (*loaded) {
        tsg_engine_wait(pager);
        tsg_pool_load_slot(pool, NULL, l, expert, load.slot);
    }
    return leave(pager, TSG_OK);
}
