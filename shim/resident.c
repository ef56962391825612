// resident.c - the bookkeeping of the pools on a CUDA device.
//
// The slot maps of all pools live either on the host (struct tsg_slots) or on the device (struct tsg_dev_pool), never in both: they move when the other
// side needs them, which is once per prompt.
#include "resident.h"

#include "engine.h"

#include <stdlib.h>
#include <string.h>

// resident.ptx was compiled with these; tests/test_ptx.py sees changes of the other sources.
static_assert(TSG_MAX_EXPERTS == 4096 && TSG_MAX_PARTS == 4, "run scripts/make-ptx, then change this line");
static_assert(TSG_ATTENTION == 0 && TSG_LOOKUP == 1 && TSG_COPY == 2 && TSG_EXPERTS == 3 && sizeof(struct tsg_layer_time) == 40, "likewise");
static_assert(TSG_POLICY_LFRU == 0 && TSG_POLICY_LRU == 1 && TSG_POLICY_SLRU == 2 && TSG_POLICY_LFU == 3 && TSG_POLICY_FIFO == 4, "likewise");

// ---- making it ----

static tsg_cu_ptr device_array(struct tsg_cuda * cuda, size_t size) {
    tsg_cu_ptr ptr = 0;
    if (!tsg_cuda_ok(cuda, cuda->memory_alloc(&ptr, size), "cuMemAlloc") || !tsg_cuda_ok(cuda, cuda->memset_d8(ptr, 0, size), "cuMemsetD8")) {
        return 0;
    }
    return ptr;
}

static bool make_pool(struct tsg_resident * r, const struct tsg_pool * pool, int32_t index) {
    struct tsg_cuda *     cuda = r->cuda;
    struct tsg_dev_pool * m    = &r->pool[index];
    const size_t n = (size_t) pool->n_experts, slots = (size_t) pool->n_slots;
    m->slot_of   = (int32_t *) device_array(cuda, n * sizeof(int32_t));
    m->expert_in = (int32_t *) device_array(cuda, slots * sizeof(int32_t));
    m->pinned    = (uint8_t *) device_array(cuda, n);
    m->use       = (struct tsg_use *) device_array(cuda, n * sizeof(struct tsg_use));
    m->hits      = (uint64_t *) device_array(cuda, n * sizeof(uint64_t));
    m->misses    = (uint64_t *) device_array(cuda, n * sizeof(uint64_t));
    m->state     = (struct tsg_dev_state *) device_array(cuda, sizeof(struct tsg_dev_state));
    m->period    = pool->slots.period;
    m->n_slots   = pool->n_slots;
    if (!m->slot_of || !m->expert_in || !m->pinned || !m->use || !m->hits || !m->misses || !m->state) {
        return false;
    }
    tsg_cu_ptr page = 0;
    if (!tsg_cuda_ok(cuda, cuda->host_alloc((void **) &r->page[index], sizeof(struct tsg_dev_counts), TSG_CU_HOST_ALLOC_MAPPED), "cuMemHostAlloc") ||
        !tsg_cuda_ok(cuda, cuda->host_device_ptr(&page, r->page[index], 0), "cuMemHostGetDevicePointer")) {
        return false;
    }
    *r->page[index] = (struct tsg_dev_counts) { 0 };
    m->page         = (struct tsg_dev_counts *) page;
    return true;
}

static bool add_bank(struct tsg_cuda * cuda, struct tsg_dev_layer * layer, const void * host, const void * slots, size_t bytes) {
    tsg_cu_ptr address = 0;
    if (!tsg_cuda_ok(cuda, cuda->host_device_ptr(&address, (void *) host, 0), "cuMemHostGetDevicePointer of the experts")) {
        return false;
    }
    layer->bank[layer->n_banks++] = (struct tsg_bank) { .host = (const char *) address, .slots = (char *) slots, .bytes = bytes };
    return true;
}

static bool make_layer(struct tsg_resident * r, struct tsg_pager * pager, int32_t index) {
    const struct tsg_layer * layer = pager->layers[index];
    const struct tsg_pool *  pool  = &pager->pools[layer->pool];
    struct tsg_dev_layer *   d     = &r->layer[index];
    *d                             = (struct tsg_dev_layer) { .first = layer->first, .n_expert = layer->n_expert };
    for (int32_t p = 0; p < layer->n_parts; p++) {
        const struct tsg_weight * w = &layer->weight[p];
        d->n_early = p < layer->n_parts - 1 ? d->n_early : d->n_banks;
        if (!add_bank(r->cuda, d, w->host, pool->slot[p]->data, w->bytes) ||
            (w->bias && !add_bank(r->cuda, d, w->bias, pool->bias[p]->data, (size_t) w->ne1 * sizeof(float))) ||
            (w->scale && !add_bank(r->cuda, d, w->scale, pool->scale[p]->data, sizeof(float)))) {
            return false;
        }
    }
    return true;
}

void tsg_resident_free(struct tsg_pager * pager) {
    struct tsg_resident * r = pager->resident;
    if (!r) {
        return;
    }
    tsg_cuda_enter(r->cuda);
    for (int32_t i = 0; i < pager->n_pools; i++) {
        const struct tsg_dev_pool * m = &r->pool[i];
        const tsg_cu_ptr arrays[] = { (tsg_cu_ptr) m->slot_of, (tsg_cu_ptr) m->expert_in, (tsg_cu_ptr) m->pinned, (tsg_cu_ptr) m->use,
                                      (tsg_cu_ptr) m->hits,    (tsg_cu_ptr) m->misses,    (tsg_cu_ptr) m->state };
        for (size_t a = 0; a < sizeof(arrays) / sizeof(arrays[0]); a++) {
            if (arrays[a]) {
                r->cuda->memory_free(arrays[a]);
            }
        }
        if (r->page[i]) {
            r->cuda->host_free(r->page[i]);
        }
    }
    if (r->link) {
        r->cuda->memory_free(r->link);
    }
    if (r->times) {
        r->cuda->memory_free((tsg_cu_ptr) r->times);
    }
    free(r->pool);
    free(r->layer);
    free(r->page);
    free(r->base);
    free(r);
    pager->resident = NULL;
}

bool tsg_resident_init(struct tsg_pager * pager) {
    struct ggml_backend_dev_props props;
    ggml_backend_dev_get_props(pager->inner, &props);
    if (pager->host.rung == TSG_HOST_PAGEABLE) {
        tsg_fail(TSG_E_STATE, "the experts lie in pageable memory, which the device cannot read by itself");
        return false;
    }
    struct tsg_cuda * cuda = tsg_pager_cuda(pager);
    if (cuda && !props.caps.events) {
        tsg_fail(TSG_E_STATE, "%s has no events", ggml_backend_dev_name(pager->inner));
    }
    struct tsg_resident * r = cuda && props.caps.events ? calloc(1, sizeof(struct tsg_resident)) : NULL;
    if (!r) {
        return false;
    }
    const size_t pools = (size_t) pager->n_pools;
    *r = (struct tsg_resident) {
        .cuda  = cuda,
        .pool  = calloc(pools, sizeof(struct tsg_dev_pool)),
        .layer = calloc((size_t) pager->n_layers, sizeof(struct tsg_dev_layer)),
        .page  = calloc(pools, sizeof(struct tsg_dev_counts *)),
        .base  = calloc(pools, sizeof(struct tsg_dev_counts)),
    };
    pager->resident = r;
    r->link         = device_array(cuda, 2 * sizeof(uint64_t));
    bool ok         = r->pool && r->layer && r->page && r->base && r->link;
    for (int32_t i = 0; i < pager->n_pools && ok; i++) {
        ok = pager->pools[i].resident || make_pool(r, &pager->pools[i], i);
    }
    for (int32_t i = 0; i < pager->n_layers && ok; i++) {
        ok = pager->pools[pager->layers[i]->pool].resident || make_layer(r, pager, i);
    }
    if (!ok) {
        tsg_resident_free(pager);
    }
    return ok;
}

void tsg_resident_throttle(struct tsg_pager * pager, double bytes_per_second) {
    struct tsg_resident * r = pager->resident;
    r->ps_per_byte          = bytes_per_second > 0 ? (uint64_t) (1e12 / bytes_per_second + 0.5) : 0;
    tsg_engine_wait(pager);
    GGML_ASSERT(tsg_cuda_enter(r->cuda) && r->cuda->copy_to_device(r->link, &r->ps_per_byte, sizeof(r->ps_per_byte)) == 0);
}

// ---- where the slot maps are ----

// To the host; the pager is locked. Waits for what runs.
void tsg_resident_to_host(struct tsg_pager * pager) {
    struct tsg_resident * r = pager->resident;
    if (!r || !r->on_device) {
        return;
    }
    tsg_engine_wait(pager);
    tsg_cuda_enter(r->cuda);
    bool ok = true;
    for (int32_t i = 0; i < pager->n_pools && ok; i++) {
        if (pager->pools[i].resident) {
            continue;
        }
        struct tsg_slots *    s = &pager->pools[i].slots;
        struct tsg_dev_pool * m = &r->pool[i];
        struct tsg_dev_state  d;
        const size_t          n = (size_t) s->n_experts;
        ok = tsg_cuda_ok(r->cuda, r->cuda->copy_to_host(&d, (tsg_cu_ptr) m->state, sizeof(d)), "cuMemcpyDtoH") &&
             tsg_cuda_ok(r->cuda, r->cuda->copy_to_host(s->slot_of, (tsg_cu_ptr) m->slot_of, n * sizeof(int32_t)), "cuMemcpyDtoH") &&
             tsg_cuda_ok(r->cuda, r->cuda->copy_to_host(s->expert_in, (tsg_cu_ptr) m->expert_in, (size_t) s->n_slots * sizeof(int32_t)), "cuMemcpyDtoH") &&
             tsg_cuda_ok(r->cuda, r->cuda->copy_to_host(s->use, (tsg_cu_ptr) m->use, n * sizeof(struct tsg_use)), "cuMemcpyDtoH") &&
             tsg_cuda_ok(r->cuda, r->cuda->copy_to_host(s->hits, (tsg_cu_ptr) m->hits, n * sizeof(uint64_t)), "cuMemcpyDtoH") &&
             tsg_cuda_ok(r->cuda, r->cuda->copy_to_host(s->misses, (tsg_cu_ptr) m->misses, n * sizeof(uint64_t)), "cuMemcpyDtoH");
        s->n_used      = d.n_used;
        s->n_protected = d.n_protected;
        s->clock       = d.clock;
    }
    GGML_ASSERT(ok && "the device lost the slot maps");
    r->on_device = false;
}

bool tsg_resident_to_device(struct tsg_pager * pager) {
    struct tsg_resident * r = pager->resident;
    if (r->on_device) {
        return true;
    }
    tsg_engine_wait(pager);
    r->free_rows = INT32_MAX;
    for (int32_t i = 0; i < pager->n_pools; i++) {
        if (pager->pools[i].resident) {
            continue;
        }
        const struct tsg_slots * s = &pager->pools[i].slots;
        const struct tsg_dev_pool * m = &r->pool[i];
        const size_t n = (size_t) s->n_experts;
        const struct tsg_dev_state state = {
            .clock       = s->clock,
            .policy      = (int32_t) s->policy,
            .n_used      = s->n_used,
            .n_protected = s->n_protected,
            .n_victims   = -1,
            .counts      = *r->page[i],
        };
        r->free_rows   = s->n_slots - s->n_pinned < r->free_rows ? s->n_slots - s->n_pinned : r->free_rows;
        if (!tsg_cuda_ok(r->cuda, r->cuda->copy_to_device((tsg_cu_ptr) m->state, &state, sizeof(state)), "cuMemcpyHtoD") ||
            !tsg_cuda_ok(r->cuda, r->cuda->copy_to_device((tsg_cu_ptr) m->slot_of, s->slot_of, n * sizeof(int32_t)), "cuMemcpyHtoD") ||
            !tsg_cuda_ok(r->cuda, r->cuda->copy_to_device((tsg_cu_ptr) m->expert_in, s->expert_in, (size_t) s->n_slots * sizeof(int32_t)), "cuMemcpyHtoD") ||
            !tsg_cuda_ok(r->cuda, r->cuda->copy_to_device((tsg_cu_ptr) m->pinned, s->pinned, n), "cuMemcpyHtoD") ||
            !tsg_cuda_ok(r->cuda, r->cuda->copy_to_device((tsg_cu_ptr) m->use, s->use, n * sizeof(struct tsg_use)), "cuMemcpyHtoD") ||
            !tsg_cuda_ok(r->cuda, r->cuda->copy_to_device((tsg_cu_ptr) m->hits, s->hits, n * sizeof(uint64_t)), "cuMemcpyHtoD") ||
            !tsg_cuda_ok(r->cuda, r->cuda->copy_to_device((tsg_cu_ptr) m->misses, s->misses, n * sizeof(uint64_t)), "cuMemcpyHtoD")) {
            return false;
        }
    }
    r->on_device = true;
    return true;
}

bool tsg_resident_show_maps(struct tsg_pager * pager) {
    const struct tsg_resident * r = pager->resident;
    for (int32_t i = 0; i < pager->n_pools; i++) {
        const struct tsg_slots * s = &pager->pools[i].slots;
        if (!pager->pools[i].resident &&
            !tsg_cuda_ok(r->cuda, r->cuda->copy_to_device((tsg_cu_ptr) r->pool[i].slot_of, s->slot_of, (size_t) s->n_experts * sizeof(int32_t)), "cuMemcpyHtoD")) {
            return false;
        }
    }
    return true;
}

// ---- counters ----

void tsg_resident_add_counts(const struct tsg_pager * pager, struct tsg_counts * counts) {
    const struct tsg_resident * r = pager->resident;
    for (int32_t i = 0; r && i < pager->n_pools; i++) {
        if (r->page[i]) {
            const struct tsg_dev_counts now = *(volatile struct tsg_dev_counts *) r->page[i];
            counts->lookups    += now.lookups - r->base[i].lookups;
            counts->hits       += now.hits - r->base[i].hits;
            counts->misses     += now.misses - r->base[i].misses;
            counts->evictions  += now.evictions - r->base[i].evictions;
            counts->bytes_link += now.bytes_link - r->base[i].bytes_link;
        }
    }
}

void tsg_resident_reset_counts(struct tsg_pager * pager) {
    struct tsg_resident * r = pager->resident;
    for (int32_t i = 0; r && i < pager->n_pools; i++) {
        r->base[i] = r->page[i] ? *r->page[i] : (struct tsg_dev_counts) { 0 };
    }
}
