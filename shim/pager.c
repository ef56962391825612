// pager.c - life of a pager: pools and layers are added, committed to device memory, filled by llama.cpp's loader, released by the last user.
#include "coexec.h"
#include "cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Biases and scales belong to the layer until commit moves them all into one page-locked buffer.
static void free_layer(struct tsg_layer * layer, bool owns_tables) {
    for (int32_t p = 0; p < layer->n_parts && owns_tables; p++) {
        free(layer->weight[p].bias);
        free(layer->weight[p].scale);
    }
    free(layer);
}

static void free_pools(struct tsg_pager * pager) {
    for (int32_t i = 0; i < pager->n_pools; i++) {
        tsg_pool_free(&pager->pools[i]);
    }
}

void tsg_pager_ref(struct tsg_pager * pager) {
    atomic_fetch_add(&pager->refs, 1);
}

void tsg_pager_unref(struct tsg_pager * pager) {
    if (atomic_fetch_sub(&pager->refs, 1) > 1) {
        return;
    }
    if (tsg_coexec_lost(pager)) {
        return;
    }
    tsg_coexec_free(pager);
    tsg_resident_free(pager);
    tsg_profile_free(pager);
    tsg_host_free(pager);
    tsg_group_leave(pager);
    free_pools(pager);
    for (int32_t i = 0; i < pager->n_layers; i++) {
        free_layer(pager->layers[i], !pager->tables);
    }
    ggml_backend_buffer_free(pager->tables);
    tsg_cuda_close(pager->cuda);
    mtx_destroy(&pager->turn);
    mtx_destroy(&pager->lock);
    free(pager->pools);
    free(pager->layers);
    free(pager);
}

enum tsg_status tsg_pager_new(void * inner_device, enum tsg_policy policy, enum tsg_engine_kind engine, struct tsg_pager ** out) {
    if (policy < TSG_POLICY_LFRU || policy > TSG_POLICY_FIFO) {
        return tsg_fail(TSG_E_ARGUMENT, "there is no policy %d", (int) policy);
    }
    struct tsg_pager * pager = calloc(1, sizeof(struct tsg_pager));
    if (!pager) {
        return tsg_fail(TSG_E_MEMORY, "no memory for a pager");
    }
    pager->inner        = inner_device;
    pager->inner_is_cpu = ggml_backend_dev_type(inner_device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    pager->policy       = policy;
    pager->engine       = engine;
    atomic_init(&pager->refs, 1);
    mtx_init(&pager->turn, mtx_plain);
    mtx_init(&pager->lock, mtx_plain);
    tsg_buffer_type_init(pager);
    tsg_device_init(pager);
    tsg_host_init(pager);
    *out = pager;
    return TSG_OK;
}

void tsg_pager_free(struct tsg_pager * pager) {
    tsg_pager_unref(pager);
}

void * tsg_pager_device(struct tsg_pager * pager) {
    return &pager->device;
}

void * tsg_pager_buffer_type(struct tsg_pager * pager) {
    return &pager->buft;
}

enum tsg_status tsg_pager_add_pool(struct tsg_pager * pager, int64_t n_slots, int32_t n_stages, int32_t * pool) {
    if (pager->committed) {
        return tsg_fail(TSG_E_STATE, "pools are added before commit");
    }
    if (n_slots < 1 || n_slots > INT32_MAX - 1) {
        return tsg_fail(TSG_E_ARGUMENT, "a pool has between 1 and 2^31 - 2 slots, not %lld", (long long) n_slots);
    }
    if (n_stages < 1 || n_stages > TSG_MAX_STAGES) {
        return tsg_fail(TSG_E_ARGUMENT, "a pool has 1 to %d prefill stages, not %d", TSG_MAX_STAGES, n_stages);
    }
    struct tsg_pool * pools = realloc(pager->pools, sizeof(struct tsg_pool) * (size_t) (pager->n_pools + 1));
    if (!pools) {
        return tsg_fail(TSG_E_MEMORY, "no memory for a pool");
    }
    pager->pools                 = pools;
    pager->pools[pager->n_pools] = (struct tsg_pool) { .n_slots = (int32_t) n_slots, .want_stages = n_stages };
    *pool                        = pager->n_pools++;
    return TSG_OK;
}

static bool name_fits(const char * name) {
    return !name || strlen(name) < GGML_MAX_NAME;
}

static bool same_layout(const struct tsg_weight * a, const struct tsg_weight * b) {
    return a->type == b->type && a->ne0 == b->ne0 && a->ne1 == b->ne1 && !a->bias_name[0] == !b->bias_name[0] &&
           !a->scale_name[0] == !b->scale_name[0];
}

static float * copy_table(const float * data, size_t n) {
    float * table = malloc(n * sizeof(float));
    if (table) {
        memcpy(table, data, n * sizeof(float));
    }
    return table;
}

static enum tsg_status add_weight(struct tsg_layer * layer, const struct tsg_part * part) {
    if (!part->weight || !name_fits(part->weight) || !name_fits(part->bias) || !name_fits(part->scale) || part->ne0 < 1 || part->ne1 < 1 ||
        part->type < 0 || part->type >= GGML_TYPE_COUNT || ggml_blck_size((enum ggml_type) part->type) == 0 ||
        part->ne0 % ggml_blck_size((enum ggml_type) part->type) != 0 || !part->bias != !part->bias_data || !part->scale != !part->scale_data) {
        return tsg_fail(TSG_E_ARGUMENT, "%s is not a weight that can be paged", part->weight ? part->weight : "a weight without a name");
    }
    struct tsg_weight * w = &layer->weight[layer->n_parts];
    *w = (struct tsg_weight) {
        .type  = (enum ggml_type) part->type,
        .ne0   = part->ne0,
        .ne1   = part->ne1,
        .bytes = ggml_row_size((enum ggml_type) part->type, part->ne0) * (size_t) part->ne1,
        .part  = layer->n_parts++,
        .layer = layer,
        .shard  = part->shard,
        .offset = part->offset,
    };
    snprintf(w->name, sizeof(w->name), "%s", part->weight);
    snprintf(w->bias_name, sizeof(w->bias_name), "%s", part->bias ? part->bias : "");
    snprintf(w->scale_name, sizeof(w->scale_name), "%s", part->scale ? part->scale : "");
    w->bias  = part->bias ? copy_table(part->bias_data, (size_t) (layer->n_expert * w->ne1)) : NULL;
    w->scale = part->scale ? copy_table(part->scale_data, (size_t) layer->n_expert) : NULL;
    if ((part->bias && !w->bias) || (part->scale && !w->scale)) {
        return tsg_fail(TSG_E_MEMORY, "no memory for the biases of %s", w->name);
    }
    return TSG_OK;
}

// Takes the layer into its pool, which the first layer gives its layout.
static enum tsg_status join_pool(struct tsg_pool * pool, struct tsg_layer * layer) {
    if (pool->n_layers == 0) {
        pool->layout  = layer->weight;
        pool->n_parts = layer->n_parts;
    }
    bool same = pool->n_parts == layer->n_parts;
    for (int32_t p = 0; same && p < layer->n_parts; p++) {
        same = same_layout(&pool->layout[p], &layer->weight[p]);
    }
    if (!same) {
        return tsg_fail(TSG_E_ARGUMENT, "%s has another layout than its pool", layer->weight[0].name);
    }
    layer->first     = pool->n_experts;
    pool->n_experts += layer->n_expert;
    pool->n_layers++;
    pool->max_expert = layer->n_expert > pool->max_expert ? layer->n_expert : pool->max_expert;
    pool->max_used   = layer->n_used > pool->max_used ? layer->n_used : pool->max_used;
    return TSG_OK;
}

enum tsg_status tsg_pager_add_layer(struct tsg_pager * pager, int32_t pool, int32_t n_expert, int32_t n_used, const struct tsg_part * parts,
                                    int32_t n_parts, int32_t * index) {
    if (pager->committed || pool < 0 || pool >= pager->n_pools) {
        return tsg_fail(TSG_E_STATE, "layers are added before commit, to a pool that exists");
    }
    if (n_expert < 1 || n_expert > TSG_MAX_EXPERTS || n_used < 1 || n_used > n_expert || n_parts < 1 || n_parts > TSG_MAX_PARTS) {
        return tsg_fail(TSG_E_ARGUMENT, "a layer of %d experts, %d used, %d weights cannot be paged", n_expert, n_used, n_parts);
    }
    struct tsg_layer *  layer  = calloc(1, sizeof(struct tsg_layer));
    struct tsg_layer ** layers = realloc(pager->layers, sizeof(struct tsg_layer *) * (size_t) (pager->n_layers + 1));
    if (layers) {
        pager->layers = layers;
    }
    if (!layer || !layers) {
        free(layer);
        return tsg_fail(TSG_E_MEMORY, "no memory for a layer");
    }
    *layer = (struct tsg_layer) { .index = pager->n_layers, .pool = pool, .n_expert = n_expert, .n_used = n_used, .stage = -1 };
    enum tsg_status status = TSG_OK;
    for (int32_t p = 0; p < n_parts && status == TSG_OK; p++) {
        status = add_weight(layer, &parts[p]);
    }
    if (status == TSG_OK) {
        status = join_pool(&pager->pools[pool], layer);
    }
    if (status != TSG_OK) {
        free_layer(layer, true);
        return status;
    }
    *index                         = pager->n_layers;
    pager->layers[pager->n_layers++] = layer;
    return TSG_OK;
}

// ---- commit ----

static float * move_table(float * table, size_t n, float ** memory) {
    float * to = *memory;
    if (table) {
        memcpy(to, table, n * sizeof(float));
        free(table);
        *memory += n;
    }
    return table ? to : NULL;
}

// Misses copy rows of these tables asynchronously, which only page-locked memory allows.
static bool pin_tables(struct tsg_pager * pager) {
    size_t n = 1;
    for (int32_t i = 0; i < pager->n_layers; i++) {
        for (int32_t p = 0; p < pager->layers[i]->n_parts; p++) {
            const struct tsg_weight * w = &pager->layers[i]->weight[p];
            n += (size_t) pager->layers[i]->n_expert * ((w->bias ? (size_t) w->ne1 : 0) + (w->scale ? 1 : 0));
        }
    }
    bool pinned;
    pager->tables = tsg_host_alloc(pager, n * sizeof(float), &pinned);
    if (!pager->tables) {
        return false;
    }
    float * memory = ggml_backend_buffer_get_base(pager->tables);
    for (int32_t i = 0; i < pager->n_layers; i++) {
        struct tsg_layer * layer = pager->layers[i];
        for (int32_t p = 0; p < layer->n_parts; p++) {
            struct tsg_weight * w = &layer->weight[p];
            w->bias               = move_table(w->bias, (size_t) (layer->n_expert * w->ne1), &memory);
            w->scale              = move_table(w->scale, (size_t) layer->n_expert, &memory);
        }
    }
    return true;
}

static enum tsg_status commit_pool(struct tsg_pager * pager, struct tsg_pool * pool) {
    if (pool->n_layers == 0 || pool->n_slots < pool->max_used) {
        return tsg_fail(TSG_E_ARGUMENT, "a pool of %d slots cannot hold the %d experts that one token needs", pool->n_slots, pool->max_used);
    }
    pool->n_slots = pool->n_slots < pool->n_experts ? pool->n_slots : pool->n_experts;
    if (!tsg_slots_init(&pool->slots, pager->policy, pool->n_slots, pool->n_experts, pool->n_layers)) {
        return tsg_fail(TSG_E_MEMORY, "no memory for the bookkeeping of %d experts", pool->n_experts);
    }
    return tsg_pool_alloc(pager, pool);
}

void tsg_pager_view_resident(struct tsg_pager * pager) {
    for (int32_t i = 0; i < pager->n_layers; i++) {
        struct tsg_layer * layer = pager->layers[i];
        struct tsg_pool *  pool  = &pager->pools[layer->pool];
        for (int32_t p = 0; p < layer->n_parts && pool->resident; p++) {
            tsg_pool_view(&layer->resident[p], pool->slot[p], layer->first, layer->n_expert);
        }
    }
}

enum tsg_status tsg_pager_commit(struct tsg_pager * pager) {
    if (pager->committed) {
        return tsg_fail(TSG_E_STATE, "a pager is committed once");
    }
    for (int32_t i = 0; i < pager->n_pools; i++) {
        const enum tsg_status status = commit_pool(pager, &pager->pools[i]);
        if (status != TSG_OK) {
            free_pools(pager);
            return status;
        }
    }
    if (!pin_tables(pager)) {
        free_pools(pager);
        return tsg_fail(TSG_E_MEMORY, "no host memory for the experts' biases and scales");
    }
    tsg_pager_view_resident(pager);
    pager->committed = true;
    return TSG_OK;
}

// Device-resident where that is possible and was not ruled out.
enum tsg_status tsg_pager_choose_engine(struct tsg_pager * pager) {
    if (pager->engine == TSG_ENGINE_HOST) {
        snprintf(pager->why, sizeof(pager->why), "host-driven, as asked");
    } else if (tsg_all_resident(pager) && pager->engine == TSG_ENGINE_AUTO) {
        snprintf(pager->why, sizeof(pager->why), "every expert is resident, llama.cpp's graph runs uncut");
    } else if (tsg_resident_init(pager)) {
        snprintf(pager->why, sizeof(pager->why), "device-resident, one CUDA graph per token");
    } else if (pager->engine == TSG_ENGINE_DEVICE) {
        return TSG_E_STATE;
    } else {
        snprintf(pager->why, sizeof(pager->why), "host-driven: %s", tsg_last_error());
    }
    return TSG_OK;
}

// Whether the host pool is there for every weight.
static bool host_complete(const struct tsg_pager * pager) {
    bool complete = pager->host.rung != TSG_HOST_NONE;
    for (int32_t i = 0; i < pager->n_layers; i++) {
        for (int32_t p = 0; p < pager->layers[i]->n_parts; p++) {
            complete &= pager->layers[i]->weight[p].host != NULL;
        }
    }
    return complete;
}

// Biases and scales of a layer whose experts all have slots. Nobody reads them there before the pool gets smaller.
static void fill_tables(struct tsg_pool * pool, const struct tsg_layer * layer) {
    const size_t first = (size_t) layer->first, n = (size_t) layer->n_expert;
    for (int32_t p = 0; p < layer->n_parts; p++) {
        const struct tsg_weight * w   = &layer->weight[p];
        const size_t              row = (size_t) w->ne1 * sizeof(float);
        if (w->bias) {
            ggml_backend_tensor_set(pool->bias[p], w->bias, first * row, n * row);
        }
        if (w->scale) {
            ggml_backend_tensor_set(pool->scale[p], w->scale, first * sizeof(float), n * sizeof(float));
        }
    }
}

enum tsg_status tsg_pager_ready(struct tsg_pager * pager, bool (*progress)(float fraction, void * data), void * data) {
    if (!pager->committed) {
        return tsg_fail(TSG_E_STATE, "a pager is committed before it is loaded");
    }
    for (int32_t i = 0; i < pager->n_layers; i++) {
        for (int32_t p = 0; p < pager->layers[i]->n_parts; p++) {
            const struct tsg_weight * w = &pager->layers[i]->weight[p];
            if (pager->group && !w->place) {
                return tsg_fail(TSG_E_STATE, "llama.cpp did not put %s on %s, where it was planned", w->name, ggml_backend_dev_name(pager->inner));
            }
            if (w->arrived != tsg_weight_bytes(w)) {
                return tsg_fail(TSG_E_STATE, "%s: %zu of %zu bytes arrived in the host pool", w->name, w->arrived, tsg_weight_bytes(w));
            }
        }
    }
    enum tsg_status status = host_complete(pager) ? TSG_OK : tsg_host_open(pager, progress, data);
    for (int32_t i = 0; i < pager->n_pools && status == TSG_OK; i++) {
        if (pager->pools[i].resident) {
            tsg_slots_fill(&pager->pools[i].slots);
        }
    }
    for (int32_t i = 0; i < pager->n_layers && status == TSG_OK; i++) {
        struct tsg_pool * pool = &pager->pools[pager->layers[i]->pool];
        if (pool->resident) {
            fill_tables(pool, pager->layers[i]);
        }
    }
    status       = status == TSG_OK ? tsg_pager_choose_engine(pager) : status;
    tsg_coexec_describe(pager);
    pager->ready = status == TSG_OK;
    return status;
}

// Copies, because a resize in another thread writes these anew.
const char * tsg_pager_host(struct tsg_pager * pager) {
    static _Thread_local char text[sizeof(pager->host.text)];
    tsg_pager_lock(pager);
    memcpy(text, pager->host.text, sizeof(text));
    tsg_pager_unlock(pager);
    return text;
}

const char * tsg_pager_engine(struct tsg_pager * pager) {
    static _Thread_local char text[sizeof(pager->why)];
    tsg_pager_lock(pager);
    snprintf(text, sizeof(text), "%s", tsg_coexec_on(pager) ? "host-driven, as the CPU computes misses" : pager->why);
    tsg_pager_unlock(pager);
    return text;
}

enum tsg_status tsg_pager_set_link(struct tsg_pager * pager, double bytes_per_second) {
    if (!pager->resident) {
        return tsg_fail(TSG_E_ARGUMENT, "only the device engine can slow down the link, and this is: %s", pager->why);
    }
    tsg_pager_lock(pager);
    tsg_resident_throttle(pager, bytes_per_second);
    tsg_pager_unlock(pager);
    return TSG_OK;
}
