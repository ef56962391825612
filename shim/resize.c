// resize.c - pools of another size while the model is open.
//
// It happens between two graphs: the pager is locked, what runs has been waited for, and the slot maps are on the host. Graphs name slots only while they
// run, so that nothing else has to be told, except captured ones, which are made anew.
//
// First everything that can fail, then the exchange. New device memory is asked for beside the old, and experts that stay move on the device. Where there is
// no room for both, the old memory goes first, and they are read from the host again. If then even that fails, the old pools are put back in the same way.
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What becomes of one pool.
struct change {
    bool            wanted;  // it gets another size
    struct tsg_pool other;   // what it will be; after the exchange, what it was
    int32_t *       from;    // [n_slots of the new] slot that the bytes come from, -1 = none
};

// ---- what is asked for ----

static enum tsg_status check_size(const struct tsg_pool * pool, int64_t n_slots) {
    const bool all = n_slots >= pool->n_experts;
    if (n_slots < pool->max_used) {
        return tsg_fail(TSG_E_ARGUMENT, "a pool of %lld slots cannot hold the %d experts that one token needs", (long long) n_slots, pool->max_used);
    }
    if (!all && n_slots - pool->slots.n_pinned < pool->max_used) {
        return tsg_fail(TSG_E_STATE, "%d experts are pinned and one token needs %d more: %lld slots are too few, give %d or unpin experts", pool->slots.n_pinned,
                        pool->max_used, (long long) n_slots, pool->slots.n_pinned + pool->max_used);
    }
    return TSG_OK;
}

// Every expert's number in its layer.
static int32_t * list_places(const struct tsg_pager * pager, int32_t index) {
    int32_t * place = malloc(sizeof(int32_t) * (size_t) pager->pools[index].n_experts);
    for (int32_t i = 0; i < pager->n_layers && place; i++) {
        const struct tsg_layer * layer = pager->layers[i];
        for (int32_t e = 0; e < layer->n_expert && layer->pool == index; e++) {
            place[layer->first + e] = e;
        }
    }
    return place;
}

static bool may_share_ring(const struct tsg_pager * pager, const struct tsg_pool * pool) {
    bool fits = pager->host.ring.n > 0;
    for (int32_t p = 0; p < pool->n_parts; p++) {
        fits &= pool->layout[p].bytes <= pager->host.ring.size;
    }
    return fits;
}

static enum tsg_status plan_pool(struct tsg_pager * pager, int32_t index, int64_t n_slots, struct change * c) {
    const struct tsg_pool * pool   = &pager->pools[index];
    const int32_t           n      = n_slots < pool->n_experts ? (int32_t) n_slots : pool->n_experts;
    const enum tsg_status   status = check_size(pool, n_slots);
    if (status != TSG_OK || n == pool->n_slots) {
        return status;
    }
    c->from         = malloc(sizeof(int32_t) * (size_t) n);
    int32_t * place = list_places(pager, index);
    c->other          = *pool;
    c->other.n_slots  = n;
    c->other.resident = n == pool->n_experts;
    c->other.buffer   = NULL;
    c->other.ctx      = NULL;
    c->other.ring     = may_share_ring(pager, pool) ? &pager->host.ring : NULL;
    c->other.slots    = (struct tsg_slots) { 0 };
    if (pool->resident || c->other.resident) {  // one has stages and the other has none; else they are handed on
        c->other.stage_buffer = NULL;
        c->other.stage_ctx    = NULL;
    }
    c->wanted = place && c->from && tsg_slots_resized(&pool->slots, n, place, &c->other.slots, c->from);
    free(place);
    return c->wanted ? TSG_OK : tsg_fail(TSG_E_MEMORY, "no memory for the bookkeeping of %d experts", pool->n_experts);
}

static enum tsg_status plan_all(struct tsg_pager * pager, const int64_t * n_slots, struct change * changes) {
    enum tsg_status status = TSG_OK;
    for (int32_t i = 0; i < pager->n_pools && status == TSG_OK; i++) {
        status = plan_pool(pager, i, n_slots[i], &changes[i]);
    }
    return status;
}

// The host pool is made ready for experts that will no longer be resident.
static enum tsg_status page_on_host(struct tsg_pager * pager, const struct change * changes) {
    bool * paged = calloc((size_t) pager->n_pools + 1, sizeof(bool));
    if (!paged) {
        return tsg_fail(TSG_E_MEMORY, "no memory for a list of pools");
    }
    for (int32_t i = 0; i < pager->n_pools; i++) {
        paged[i] = changes[i].wanted && !changes[i].other.resident && pager->pools[i].resident;
    }
    const enum tsg_status status = tsg_host_page(pager, paged, pager->resident || pager->engine == TSG_ENGINE_DEVICE);
    free(paged);
    return status;
}

// ---- device memory ----

// Stages that the pool has before and after stay where they are.
static void release(struct tsg_pool * pool, const struct tsg_pool * other) {
    tsg_pool_release_slots(pool);
    if (pool->stage_buffer != other->stage_buffer) {
        tsg_pool_release_stages(pool);
    }
}

static void release_others(struct tsg_pager * pager, struct change * changes) {
    for (int32_t i = 0; i < pager->n_pools; i++) {
        if (changes[i].wanted) {
            release(&changes[i].other, &pager->pools[i]);
        }
    }
}

static void release_present(struct tsg_pager * pager, const struct change * changes) {
    for (int32_t i = 0; i < pager->n_pools; i++) {
        if (changes[i].wanted) {
            release(&pager->pools[i], &changes[i].other);
        }
    }
}

// Memory for all the others, or for none. False: tsg_last_error() says what it was that did not fit.
static bool alloc_others(struct tsg_pager * pager, struct change * changes) {
    bool ok = true;
    for (int32_t i = 0; i < pager->n_pools && ok; i++) {
        ok = !changes[i].wanted || tsg_pool_alloc(pager, &changes[i].other) == TSG_OK;
    }
    if (!ok) {
        release_others(pager, changes);
    }
    return ok;
}

// ---- the bytes ----

static uint64_t load_from_host(struct tsg_pager * pager, int32_t index, struct tsg_pool * pool, int32_t slot) {
    const int32_t      expert = pool->slots.expert_in[slot];
    struct tsg_layer * layer  = tsg_layer_of(pager, index, expert);
    tsg_pool_load_slot(pool, NULL, layer, expert - layer->first, slot);
    return tsg_layer_expert_bytes(layer);
}

// `size` bytes of a buffer, as a tensor that ggml can copy.
static struct ggml_tensor bytes_at(const struct ggml_tensor * tensor, size_t offset, size_t size) {
    return (struct ggml_tensor) {
        .type   = GGML_TYPE_I8,
        .buffer = tensor->buffer,
        .data   = (char *) tensor->data + offset,
        .ne     = { (int64_t) size, 1, 1, 1 },
        .nb     = { 1, size, size, size },
    };
}

static void copy_rows(const struct ggml_tensor * from, const struct ggml_tensor * to, size_t row, int32_t src, int32_t dst, int32_t n) {
    if (from) {
        struct ggml_tensor a = bytes_at(from, (size_t) src * row, (size_t) n * row);
        struct ggml_tensor b = bytes_at(to, (size_t) dst * row, (size_t) n * row);
        ggml_backend_tensor_copy(&a, &b);
    }
}

static void copy_slots(const struct tsg_pool * from, const struct tsg_pool * to, int32_t src, int32_t dst, int32_t n) {
    for (int32_t p = 0; p < from->n_parts; p++) {
        copy_rows(from->slot[p], to->slot[p], from->layout[p].bytes, src, dst, n);
        copy_rows(from->bias[p], to->bias[p], (size_t) from->layout[p].ne1 * sizeof(float), src, dst, n);
        copy_rows(from->scale[p], to->scale[p], sizeof(float), src, dst, n);
    }
}

// After the exchange: whoever has a slot gets its bytes there, from the pool that was, neighbours in one piece, or from the host.
static void fill(struct tsg_pager * pager, int32_t index, const struct change * c, struct tsg_resized * out) {
    struct tsg_pool * pool = &pager->pools[index];
    for (int32_t s = 0, end; s < pool->n_slots; s = end) {
        end = s + 1;
        if (pool->slots.expert_in[s] < 0) {
            continue;
        }
        if (!out->beside || c->from[s] < 0) {
            out->bytes_link += load_from_host(pager, index, pool, s);
            out->loaded++;
            continue;
        }
        while (end < pool->n_slots && c->from[end] == c->from[s] + (end - s)) {
            end++;
        }
        copy_slots(&c->other, pool, c->from[s], s, end - s);
    }
}

// ---- the engine ----

static bool start_streams(struct tsg_pager * pager) {
    bool ok = true;
    for (struct tsg_engine * e = pager->engines; e; e = e->next) {
        ok = ok && tsg_resident_engine_init(e);
    }
    for (struct tsg_engine * e = pager->engines; e && !ok; e = e->next) {
        tsg_resident_engine_free(e);
    }
    return ok;
}

// What the device engine knows of the pools is made anew; where everything was resident it may now begin. False: nothing changed.
static bool renew_engine(struct tsg_pager * pager) {
    if (!pager->resident) {
        if (tsg_pager_choose_engine(pager) != TSG_OK) {
            return false;
        }
        if (!pager->resident || start_streams(pager)) {
            return true;
        }
        tsg_resident_free(pager);
        return false;
    }
    if (!tsg_resident_renew(pager)) {
        return false;
    }
    snprintf(pager->why, sizeof(pager->why),
             tsg_all_resident(pager) ? "every expert is resident, llama.cpp's graph runs uncut" : "device-resident, one CUDA graph per token");
    return true;
}

// The present pools and the others.
static void exchange(struct tsg_pager * pager, struct change * changes) {
    for (int32_t i = 0; i < pager->n_pools; i++) {
        if (changes[i].wanted) {
            const struct tsg_pool present = pager->pools[i];
            pager->pools[i]               = changes[i].other;
            changes[i].other              = present;
        }
    }
}

// ---- there and back ----

// With the reason that stands in tsg_last_error().
static enum tsg_status stays(void) {
    char why[256];
    snprintf(why, sizeof(why), "%s", tsg_last_error());
    return tsg_fail(TSG_E_MEMORY, "%s; the expert cache stays as it was", why);
}

// The pools as they were, after their memory was given away.
static enum tsg_status put_back(struct tsg_pager * pager, const struct change * changes) {
    char            why[256];
    enum tsg_status status = TSG_OK;
    snprintf(why, sizeof(why), "%s", tsg_last_error());
    for (int32_t i = 0; i < pager->n_pools && status == TSG_OK; i++) {
        struct tsg_pool * pool = &pager->pools[i];
        status                 = changes[i].wanted ? tsg_pool_alloc(pager, pool) : TSG_OK;
        for (int32_t s = 0; s < pool->n_slots && changes[i].wanted && status == TSG_OK; s++) {
            if (pool->slots.expert_in[s] >= 0) {
                pager->counts[TSG_DECODE].bytes_link += load_from_host(pager, i, pool, s);
            }
        }
    }
    tsg_pager_view_resident(pager);
    if (status != TSG_OK) {
        pager->broken = true;
        pager->ready  = false;
        return tsg_fail(TSG_E_MEMORY, "%s; and the memory that was given away for it is gone: load the model again", why);
    }
    tsg_fail(TSG_E_MEMORY, "%s", why);
    return stays();
}

static void count(struct tsg_pager * pager, const struct change * changes, struct tsg_resized * out) {
    for (int32_t i = 0; i < pager->n_pools; i++) {
        const struct tsg_slots * now = &pager->pools[i].slots, * before = &changes[i].other.slots;
        for (int32_t x = 0; x < now->n_experts; x++) {
            const bool was = changes[i].wanted ? before->slot_of[x] >= 0 : now->slot_of[x] >= 0;
            out->kept    += was && now->slot_of[x] >= 0;
            out->evicted += was && now->slot_of[x] < 0;
        }
    }
    pager->counts[TSG_DECODE].evictions  += (uint64_t) out->evicted;
    pager->counts[TSG_DECODE].bytes_link += out->bytes_link;
}

// Nothing runs and every change is planned.
static enum tsg_status carry_out(struct tsg_pager * pager, struct change * changes, struct tsg_resized * out) {
    out->beside = alloc_others(pager, changes);
    if (!out->beside) {
        release_present(pager, changes);
        if (!alloc_others(pager, changes)) {
            return put_back(pager, changes);
        }
    }
    pager->n_resized++;
    for (struct tsg_engine * e = pager->engines; e; e = e->next) {
        tsg_resident_engine_forget(e);
    }
    exchange(pager, changes);
    if (!renew_engine(pager)) {
        exchange(pager, changes);
        release_others(pager, changes);
        return out->beside ? stays() : put_back(pager, changes);
    }
    for (int32_t i = 0; i < pager->n_pools; i++) {
        if (changes[i].wanted) {
            fill(pager, i, &changes[i], out);
        }
    }
    count(pager, changes, out);
    release_others(pager, changes);
    tsg_pager_view_resident(pager);
    return TSG_OK;
}

// Whole layers make way for a resize, and come back into what there is then.
static void place_layers(struct tsg_pager * pager) {
    struct tsg_coexec * x = &pager->coexec;
    if (!pager->broken && x->miss.mode == TSG_MISS_LAYERS && tsg_coexec_on(pager) && !tsg_layers_place(pager)) {
        x->miss.mode = TSG_MISS_FETCH;
    }
    tsg_coexec_describe(pager);
}

static enum tsg_status resize(struct tsg_pager * pager, const int64_t * n_slots, struct tsg_resized * out) {
    struct change * changes = calloc((size_t) pager->n_pools + 1, sizeof(struct change));
    if (!changes) {
        return tsg_fail(TSG_E_MEMORY, "no memory for a list of pools");
    }
    tsg_admit_settle(pager);
    tsg_resident_to_host(pager);
    tsg_engine_wait(pager);
    if (pager->cuda) {
        tsg_cuda_enter(pager->cuda);  // this thread may never have seen the device
    }
    tsg_layers_release(pager, true);
    enum tsg_status status = plan_all(pager, n_slots, changes);
    status = status == TSG_OK ? page_on_host(pager, changes) : status;
    status = status == TSG_OK ? carry_out(pager, changes, out) : status;
    for (int32_t i = 0; i < pager->n_pools; i++) {
        tsg_slots_free(&changes[i].other.slots);
        free(changes[i].from);
    }
    free(changes);
    place_layers(pager);
    return status;
}

enum tsg_status tsg_pager_resize(struct tsg_pager * pager, const int64_t * n_slots, struct tsg_resized * out) {
    *out = (struct tsg_resized) { .beside = true };
    tsg_pager_lock(pager);
    const enum tsg_status status = pager->ready ? resize(pager, n_slots, out) : tsg_fail(TSG_E_STATE, "the model is not loaded");
    tsg_pager_unlock(pager);
    return status;
}
