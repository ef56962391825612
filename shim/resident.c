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

// An array of a pool's bookkeeping on both sides.
struct array {
    void ** device;
    void *  host;
    size_t  bytes;
};

enum { N_ARRAYS = 6 };

static void list_arrays(struct tsg_dev_pool * m, struct tsg_slots * s, struct array arrays[N_ARRAYS]) {
    const size_t n = (size_t) s->n_experts, slots = (size_t) s->n_slots;
    arrays[0] = (struct array) { (void **) &m->slot_of, s->slot_of, n * sizeof(int32_t) };
    arrays[1] = (struct array) { (void **) &m->expert_in, s->expert_in, slots * sizeof(int32_t) };
    arrays[2] = (struct array) { (void **) &m->pinned, s->pinned, n * sizeof(bool) };
    arrays[3] = (struct array) { (void **) &m->use, s->use, n * sizeof(struct tsg_use) };
    arrays[4] = (struct array) { (void **) &m->hits, s->hits, n * sizeof(uint64_t) };
    arrays[5] = (struct array) { (void **) &m->misses, s->misses, n * sizeof(uint64_t) };
}

static bool make_pool(struct tsg_resident * r, struct tsg_pool * pool, int32_t index) {
    struct tsg_cuda *     cuda = r->cuda;
    struct tsg_dev_pool * m    = &r->pool[index];
    struct array          arrays[N_ARRAYS];
    list_arrays(m, &pool->slots, arrays);
    for (int i = 0; i < N_ARRAYS; i++) {
        *arrays[i].device = (void *) device_array(cuda, arrays[i].bytes);
        if (!*arrays[i].device) {
            return false;
        }
    }
    m->state   = (struct tsg_dev_state *) device_array(cuda, sizeof(struct tsg_dev_state));
    m->period  = pool->slots.period;
    m->n_slots = pool->n_slots;
    tsg_cu_ptr page = 0;
    if (!m->state || !tsg_cuda_ok(cuda, cuda->host_alloc((void **) &r->page[index], sizeof(struct tsg_dev_counts), TSG_CU_HOST_ALLOC_MAPPED), "cuMemHostAlloc") ||
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
        struct array arrays[N_ARRAYS];
        list_arrays(&r->pool[i], &pager->pools[i].slots, arrays);
        for (int a = 0; a < N_ARRAYS; a++) {
            if (*arrays[a].device) {
                r->cuda->memory_free((tsg_cu_ptr) *arrays[a].device);
            }
        }
        if (r->pool[i].state) {
            r->cuda->memory_free((tsg_cu_ptr) r->pool[i].state);
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

bool tsg_resident_renew(struct tsg_pager * pager) {
    struct tsg_resident * old = pager->resident;
    pager->resident           = NULL;
    if (!tsg_resident_init(pager)) {
        pager->resident = old;
        return false;
    }
    struct tsg_resident * r    = pager->resident;
    const tsg_cu_ptr      link = r->link;
    r->link        = old->link;  // the throttle stays, and so do the times of layers
    r->ps_per_byte = old->ps_per_byte;
    r->times       = old->times;
    r->epoch       = old->epoch;
    old->link      = link;
    old->times     = NULL;
    pager->resident = old;
    tsg_resident_add_counts(pager, &pager->counts[TSG_DECODE]);  // the new pages begin at zero
    tsg_resident_free(pager);
    pager->resident = r;
    return true;
}

void tsg_resident_throttle(struct tsg_pager * pager, double bytes_per_second) {
    struct tsg_resident * r = pager->resident;
    r->ps_per_byte          = bytes_per_second > 0 ? (uint64_t) (1e12 / bytes_per_second + 0.5) : 0;
    tsg_engine_wait(pager);
    GGML_ASSERT(tsg_cuda_enter(r->cuda) && r->cuda->copy_to_device(r->link, &r->ps_per_byte, sizeof(r->ps_per_byte)) == 0);
}

bool tsg_resident_delay(const struct tsg_pager * pager, tsg_cu_stream stream, bool begin, uint64_t bytes) {
    const struct tsg_resident * r        = pager->resident;
    uint64_t                    ns       = bytes * r->ps_per_byte / 1000;
    tsg_cu_ptr                  mark     = r->link + sizeof(uint64_t);
    void *                      params[] = { &mark, &ns };
    return r->ps_per_byte == 0 ||
           tsg_cuda_ok(r->cuda, r->cuda->launch(begin ? r->cuda->mark : r->cuda->delay, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL), "cuLaunchKernel");
}

// ---- where the slot maps are ----

// Waits for what runs. Afterwards the host has a copy of the slot maps that are on the device.
void tsg_resident_look(struct tsg_pager * pager) {
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
        struct array          arrays[N_ARRAYS];
        list_arrays(m, s, arrays);
        ok = tsg_cuda_ok(r->cuda, r->cuda->copy_to_host(&d, (tsg_cu_ptr) m->state, sizeof(d)), "cuMemcpyDtoH");
        for (int a = 0; a < N_ARRAYS && ok; a++) {
            ok = tsg_cuda_ok(r->cuda, r->cuda->copy_to_host(arrays[a].host, (tsg_cu_ptr) *arrays[a].device, arrays[a].bytes), "cuMemcpyDtoH");
        }
        s->n_used      = d.n_used;
        s->n_protected = d.n_protected;
        s->clock       = d.clock;
    }
    GGML_ASSERT(ok && "the device lost the slot maps");
}

// To the host; the pager is locked.
void tsg_resident_to_host(struct tsg_pager * pager) {
    tsg_resident_look(pager);
    if (pager->resident) {
        pager->resident->on_device = false;
    }
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
        struct tsg_slots *    s = &pager->pools[i].slots;
        struct tsg_dev_pool * m = &r->pool[i];
        const struct tsg_dev_state state = {
            .clock       = s->clock,
            .policy      = (int32_t) s->policy,
            .n_used      = s->n_used,
            .n_protected = s->n_protected,
            .n_victims   = -1,
            .counts      = *r->page[i],
        };
        r->free_rows   = s->n_slots - s->n_pinned < r->free_rows ? s->n_slots - s->n_pinned : r->free_rows;
        if (!tsg_cuda_ok(r->cuda, r->cuda->copy_to_device((tsg_cu_ptr) m->state, &state, sizeof(state)), "cuMemcpyHtoD")) {
            return false;
        }
        struct array arrays[N_ARRAYS];
        list_arrays(m, s, arrays);
        for (int a = 0; a < N_ARRAYS; a++) {
            if (!tsg_cuda_ok(r->cuda, r->cuda->copy_to_device((tsg_cu_ptr) *arrays[a].device, arrays[a].host, arrays[a].bytes), "cuMemcpyHtoD")) {
                return false;
            }
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
