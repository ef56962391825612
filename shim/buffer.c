// buffer.c - the expert buffer type: where llama.cpp's loader puts the expert weights and adapters to them, and memory that the device can read fast.
#define _DEFAULT_SOURCE  // MAP_ANONYMOUS

#include "pager.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static struct tsg_pager * pager_of(ggml_backend_buffer_type_t buft) {
    return buft->context;
}

// Host memory for `size` bytes, page-locked if the device has such a buffer type and grants it. CUDA's host buffer type falls back to plain memory
// on its own; the buffer's type tells.
ggml_backend_buffer_t tsg_host_alloc(struct tsg_pager * pager, size_t size, bool * pinned) {
    ggml_backend_buffer_type_t host   = ggml_backend_dev_host_buffer_type(pager->inner);
    ggml_backend_buffer_t      buffer = ggml_backend_buft_alloc_buffer(host ? host : ggml_backend_cpu_buffer_type(), size);
    *pinned                           = buffer && (!host || ggml_backend_buffer_get_type(buffer) == host);
    return buffer;
}

struct tsg_weight * tsg_weight_of(struct tsg_pager * pager, const struct ggml_tensor * tensor) {
    return tensor && tensor->buffer && tensor->buffer->buft == &pager->buft ? tensor->extra : NULL;
}

// ---- buffer ----

// Addresses without memory: host.c knows where the bytes lie in the file, and a copy of them would be one too many.
struct address_buffer {
    struct tsg_pager * pager;
    void *             base;
};

// The model goes: from now on there is nothing to load from.
static void forget_weights(struct tsg_pager * pager, const char * base, size_t size) {
    tsg_pager_lock(pager);
    for (int32_t l = 0; l < pager->n_layers; l++) {
        for (int32_t p = 0; p < pager->layers[l]->n_parts; p++) {
            struct tsg_weight * w = &pager->layers[l]->weight[p];
            if (w->place && (const char *) w->place >= base && (const char *) w->place < base + size) {
                w->host      = NULL;
                w->place     = NULL;
                w->arrived   = 0;
                w->changed   = false;
                pager->ready = false;
            }
        }
    }
    tsg_pager_unlock(pager);
}

static void tsg_buffer_free(ggml_backend_buffer_t buffer) {
    struct address_buffer * addresses = buffer->context;
    forget_weights(addresses->pager, addresses->base, buffer->size);
    munmap(addresses->base, buffer->size);
    tsg_pager_unref(addresses->pager);
    free(addresses);
}

static void * tsg_buffer_get_base(ggml_backend_buffer_t buffer) {
    return ((struct address_buffer *) buffer->context)->base;
}

// llama.cpp's loader places a tensor here because its name matched the override: find out which weight it is.
static enum ggml_status tsg_buffer_init_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor) {
    struct tsg_pager * pager = ((struct address_buffer *) buffer->context)->pager;
    for (int32_t l = 0; l < pager->n_layers; l++) {
        struct tsg_layer * layer = pager->layers[l];
        for (int32_t p = 0; p < layer->n_parts; p++) {
            struct tsg_weight * w = &layer->weight[p];
            if (strcmp(w->name, tensor->name) != 0) {
                continue;
            }
            if (w->type != tensor->type || w->ne0 != tensor->ne[0] || w->ne1 != tensor->ne[1] || layer->n_expert != tensor->ne[2]) {
                tsg_fail(TSG_E_ARGUMENT, "%s has another type or shape than was planned", tensor->name);
                return GGML_STATUS_FAILED;
            }
            w->place      = tensor->data;
            tensor->extra = w;
            return GGML_STATUS_SUCCESS;
        }
    }
    tsg_fail(TSG_E_ARGUMENT, "%s is not an expert weight that was planned", tensor->name);
    return GGML_STATUS_FAILED;
}

// Counted, not kept: tsg_pager_ready() maps the same bytes.
static void tsg_buffer_set_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    struct tsg_weight * w = tensor->extra;
    w->arrived += size;
    w->changed |= !tsg_host_has(((struct address_buffer *) buffer->context)->pager, w, data, offset, size);
}

// For a backend that cannot read this buffer. Zeros before the pager is ready.
static void tsg_buffer_get_tensor(ggml_backend_buffer_t buffer, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const struct tsg_weight * w = tensor->view_src ? tensor->view_src->extra : tensor->extra;
    (void) buffer;
    if (w->host) {
        memcpy(data, w->host + tensor->view_offs + offset, size);
    } else {
        memset(data, 0, size);
    }
}

// The file is not written.
static void tsg_buffer_memset_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    (void) buffer, (void) tensor, (void) value, (void) offset, (void) size;
}

static void tsg_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    (void) buffer, (void) value;
}

// ---- buffer type ----

static const char * tsg_buffer_type_get_name(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return "Experts";
}

// Every weight has its place: what comes now is no part of the model.
static bool all_placed(const struct tsg_pager * pager) {
    bool placed = pager->n_layers > 0;
    for (int32_t l = 0; l < pager->n_layers; l++) {
        for (int32_t p = 0; p < pager->layers[l]->n_parts; p++) {
            placed &= pager->layers[l]->weight[p].place != NULL;
        }
    }
    return placed;
}

// An adapter's tensors are put where the weight lies that they change. Beside experts that is here, but they are read whole and by expert id, as they are:
// ordinary device memory.
static ggml_backend_buffer_type_t inner_type(ggml_backend_buffer_type_t buft) {
    return ggml_backend_dev_buffer_type(pager_of(buft)->inner);
}

static ggml_backend_buffer_t tsg_buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    if (all_placed(pager_of(buft))) {
        return ggml_backend_buft_alloc_buffer(inner_type(buft), size);
    }
    struct address_buffer * addresses = malloc(sizeof(struct address_buffer));
    void *                  base      = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!addresses || base == MAP_FAILED) {
        free(addresses);
        tsg_fail(TSG_E_MEMORY, "%zu MiB of addresses for the experts cannot be had", size >> 20);
        return NULL;
    }
    *addresses = (struct address_buffer) { .pager = pager_of(buft), .base = base };
    const struct ggml_backend_buffer_i iface = {
        .free_buffer   = tsg_buffer_free,
        .get_base      = tsg_buffer_get_base,
        .init_tensor   = tsg_buffer_init_tensor,
        .memset_tensor = tsg_buffer_memset_tensor,
        .set_tensor    = tsg_buffer_set_tensor,
        .get_tensor    = tsg_buffer_get_tensor,
        .clear         = tsg_buffer_clear,
    };
    tsg_pager_ref(addresses->pager);
    return ggml_backend_buffer_init(buft, iface, addresses, size);
}

// What ggml measures a buffer by before it asks for one. Weights are only addresses, so that more than they need costs nothing.
static size_t tsg_buffer_type_get_alignment(ggml_backend_buffer_type_t buft) {
    const size_t alignment = ggml_backend_buft_get_alignment(inner_type(buft));
    return alignment > 64 ? alignment : 64;
}

static size_t tsg_buffer_type_get_alloc_size(ggml_backend_buffer_type_t buft, const struct ggml_tensor * tensor) {
    return ggml_backend_buft_get_alloc_size(inner_type(buft), tensor);
}

// Not host: the loader must fill it through set_tensor, and the scheduler must not hand it to the CPU backend.
static bool tsg_buffer_type_is_host(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return false;
}

void tsg_buffer_type_init(struct tsg_pager * pager) {
    pager->buft = (struct ggml_backend_buffer_type) {
        .iface = {
            .get_name       = tsg_buffer_type_get_name,
            .alloc_buffer   = tsg_buffer_type_alloc_buffer,
            .get_alignment  = tsg_buffer_type_get_alignment,
            .get_alloc_size = tsg_buffer_type_get_alloc_size,
            .is_host        = tsg_buffer_type_is_host,
        },
        .device  = &pager->device,
        .context = pager,
    };
}
