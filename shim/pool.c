// pool.c - device memory of the slots, and the copies into it.
#include "pager.h"

#include <stdlib.h>

size_t tsg_layer_expert_bytes(const struct tsg_layer * layer) {
    size_t bytes = 0;
    for (int32_t p = 0; p < layer->n_parts; p++) {
        const struct tsg_weight * w = &layer->weight[p];
        bytes += w->bytes + (w->bias ? (size_t) w->ne1 * sizeof(float) : 0) + (w->scale ? sizeof(float) : 0);
    }
    return bytes;
}

static ggml_backend_buffer_t alloc_zeroed(struct tsg_pager * pager, struct ggml_context * ctx) {
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(pager->inner));
    if (buffer) {
        ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_buffer_clear(buffer, 0);
    }
    return buffer;
}

static struct ggml_context * tensors_only(void) {
    return ggml_init((struct ggml_init_params) { .mem_size = ggml_tensor_overhead() * 4 * TSG_MAX_PARTS, .no_alloc = true });
}

// Slots, with one expert of zeros behind the last, which ne does not count. Where the CPU computes misses there is one more, which ne counts: the device is
// pointed at it for what the CPU computes.
static bool alloc_slots(struct tsg_pager * pager, struct tsg_pool * pool) {
    const int64_t n_slots = pool->n_slots + 1 + (pager->coexec.cpu && !pool->resident);
    pool->ctx             = tensors_only();
    for (int32_t p = 0; p < pool->n_parts; p++) {
        const struct tsg_weight * w = &pool->layout[p];
        pool->slot[p]  = ggml_new_tensor_3d(pool->ctx, w->type, w->ne0, w->ne1, n_slots);
        pool->bias[p]  = w->bias ? ggml_new_tensor_2d(pool->ctx, GGML_TYPE_F32, w->ne1, n_slots) : NULL;
        pool->scale[p] = w->scale ? ggml_new_tensor_1d(pool->ctx, GGML_TYPE_F32, n_slots) : NULL;
    }
    pool->buffer = alloc_zeroed(pager, pool->ctx);
    for (int32_t p = 0; p < pool->n_parts && pool->buffer; p++) {
        pool->slot[p]->ne[2]--;
        if (pool->bias[p]) {
            pool->bias[p]->ne[1]--;
        }
        if (pool->scale[p]) {
            pool->scale[p]->ne[0]--;
        }
    }
    return pool->buffer != NULL;
}

// Stages of one layer for prefill, likewise with an expert of zeros behind the last.
static bool alloc_stages(struct tsg_pager * pager, struct tsg_pool * pool) {
    pool->stage_ctx = tensors_only();
    for (int32_t i = 0; i < pool->n_stages; i++) {
        for (int32_t p = 0; p < pool->n_parts; p++) {
            const struct tsg_weight * w = &pool->layout[p];
            pool->stage[i][p]           = ggml_new_tensor_3d(pool->stage_ctx, w->type, w->ne0, w->ne1, pool->max_expert + 1);
        }
    }
    pool->stage_buffer = alloc_zeroed(pager, pool->stage_ctx);
    for (int32_t i = 0; i < pool->n_stages && pool->stage_buffer; i++) {
        for (int32_t p = 0; p < pool->n_parts; p++) {
            pool->stage[i][p]->ne[2]--;
        }
    }
    return pool->stage_buffer != NULL;
}

enum tsg_status tsg_pool_alloc(struct tsg_pager * pager, struct tsg_pool * pool) {
    pool->resident = pool->n_slots == pool->n_experts;
    pool->n_stages = pool->resident ? 0 : pool->want_stages;
    if (!alloc_slots(pager, pool) || (!pool->resident && !pool->stage_buffer && !alloc_stages(pager, pool))) {
        return tsg_fail(TSG_E_MEMORY, "%s has no room for a pool of %d experts of %.1f MiB: give a smaller expert cache",
                        ggml_backend_dev_name(pager->inner), pool->n_slots, (double) tsg_layer_expert_bytes(pool->layout->layer) / (1 << 20));
    }
    return TSG_OK;
}

void tsg_pool_release_slots(struct tsg_pool * pool) {
    ggml_backend_buffer_free(pool->buffer);
    ggml_free(pool->ctx);
    pool->buffer = NULL;  // a commit that failed half-way may be tried again
    pool->ctx    = NULL;
}

void tsg_pool_release_stages(struct tsg_pool * pool) {
    ggml_backend_buffer_free(pool->stage_buffer);
    ggml_free(pool->stage_ctx);
    pool->stage_buffer = NULL;
    pool->stage_ctx    = NULL;
}

void tsg_pool_free(struct tsg_pool * pool) {
    tsg_slots_free(&pool->slots);
    free(pool->before);
    pool->before = NULL;
    tsg_pool_release_slots(pool);
    tsg_pool_release_stages(pool);
}

// ---- copies ----

static void copy_in(ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t size, int64_t index) {
    if (backend) {
        ggml_backend_tensor_set_async(backend, tensor, data, (size_t) index * size, size);
    } else {
        ggml_backend_tensor_set(tensor, data, (size_t) index * size, size);
    }
}

// Experts in pageable memory take the ring; the call without a backend waits anyway.
static void copy_weight(const struct tsg_pool * pool, ggml_backend_t backend, struct ggml_tensor * tensor, const struct tsg_weight * w, int32_t expert,
                        int64_t index) {
    const uint8_t * data = w->host + (size_t) expert * w->bytes;
    if (backend && pool->ring) {
        tsg_ring_copy(pool->ring, backend, tensor, data, (size_t) index * w->bytes, w->bytes);
    } else {
        copy_in(backend, tensor, data, w->bytes, index);
    }
}

void tsg_pool_load_slot(struct tsg_pool * pool, ggml_backend_t backend, const struct tsg_layer * layer, int32_t expert, int32_t slot) {
    for (int32_t p = 0; p < layer->n_parts; p++) {
        const struct tsg_weight * w = &layer->weight[p];
        copy_weight(pool, backend, pool->slot[p], w, expert, slot);
        if (w->bias) {
            copy_in(backend, pool->bias[p], w->bias + expert * w->ne1, (size_t) w->ne1 * sizeof(float), slot);
        }
        if (w->scale) {
            copy_in(backend, pool->scale[p], w->scale + expert, sizeof(float), slot);
        }
    }
}

void tsg_pool_load_stage(struct tsg_pool * pool, ggml_backend_t backend, const struct tsg_layer * layer, int32_t expert, int32_t stage) {
    for (int32_t p = 0; p < layer->n_parts; p++) {
        copy_weight(pool, backend, pool->stage[stage][p], &layer->weight[p], expert, expert);
    }
}

void tsg_pool_view(struct ggml_tensor * view, const struct ggml_tensor * tensor, int64_t first, int64_t n) {
    *view       = *tensor;
    view->ne[2] = n;
    view->nb[3] = view->nb[2] * (size_t) n;
    view->data  = (char *) tensor->data + (size_t) first * tensor->nb[2];
}

void tsg_pool_slot_to_stage(struct tsg_pool * pool, ggml_backend_t backend, int32_t slot, int32_t expert) {
    for (int32_t p = 0; p < pool->n_parts; p++) {
        struct ggml_tensor from, to;
        tsg_pool_view(&from, pool->slot[p], slot, 1);
        tsg_pool_view(&to, pool->stage[0][p], expert, 1);
        ggml_backend_tensor_copy_async(backend, backend, &from, &to);
    }
}
