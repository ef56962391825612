// profile.c - where the time of decode goes, layer by layer.
//
// The device engine's kernels stamp when they begin and end, and one more kernel beside the graph stamps the end of every layer: the graph waits for none of
// them. The host-driven engine waits between the stretches, as the host's clock has to stand for the device's.
#include "engine.h"

#include <stdlib.h>

// ---- the host-driven engine ----

void tsg_profile_start(struct tsg_engine * e, enum tsg_phase phase) {
    e->timing = phase == TSG_DECODE && e->pager->profile.on;
    if (e->timing) {
        ggml_backend_synchronize(e->inner);
        e->pager->profile.since = tsg_nanoseconds();
    }
}

void tsg_profile_mark(struct tsg_engine * e, int32_t layer, enum tsg_stretch stretch) {
    if (!e->timing) {
        return;
    }
    struct tsg_profile *    profile = &e->pager->profile;
    struct tsg_layer_time * time    = &profile->layers[layer];
    ggml_backend_synchronize(e->inner);
    const uint64_t now = tsg_nanoseconds();
    time->ns[stretch] += now - profile->since;
    time->graphs      += stretch == TSG_ATTENTION;
    profile->since = now;
}

// ---- the device engine ----

struct tsg_dev_time * tsg_profile_of(const struct tsg_engine * e, int32_t layer) {
    return e->pager->profile.on ? &e->pager->resident->times[layer] : NULL;
}

bool tsg_profile_stamp(struct tsg_engine * e, int32_t layer, enum tsg_stamp what) {
    struct tsg_dev_time *   time   = tsg_profile_of(e, layer);
    struct tsg_dev_time *   before = tsg_profile_of(e, what == TSG_STAMP_BEGIN ? layer : e->timed);
    const struct tsg_cuda * cuda   = e->pager->resident->cuda;
    int32_t                 kind   = (int32_t) what;
    void *                  params[] = { &time, &before, &kind };
    e->timed = layer;
    return !time || (tsg_ours_waits(e, e->side, TSG_EV_TIME) &&
                     tsg_cuda_ok(cuda, cuda->launch(cuda->stamp, 1, 1, 1, 1, 1, 1, 0, e->side, params, NULL), "cuLaunchKernel") &&
                     (what != TSG_STAMP_OUTPUT ||  // the last one has to join a capture
                      (tsg_cuda_ok(cuda, cuda->event_record(e->event[TSG_EV_TIME]->context, e->side), "cuEventRecord") &&
                       tsg_cuda_ok(cuda, cuda->stream_wait(e->stream, e->event[TSG_EV_TIME]->context, 0), "cuStreamWaitEvent"))));
}

// ---- on and off ----

static enum tsg_status take_times(struct tsg_pager * pager, bool on) {
    struct tsg_profile *  profile = &pager->profile;
    struct tsg_resident * r       = pager->resident;
    const size_t          n       = (size_t) pager->n_layers + 1;
    const bool            was_on  = profile->on;
    tsg_engine_wait(pager);
    free(profile->layers);
    *profile = (struct tsg_profile) { .layers = on ? calloc(n, sizeof(struct tsg_layer_time)) : NULL };
    if (on && !profile->layers) {
        return tsg_fail(TSG_E_MEMORY, "no memory for the times of %zu layers", n);
    }
    if (r) {
        const size_t size = n * sizeof(struct tsg_dev_time);
        tsg_cu_ptr   ptr  = (tsg_cu_ptr) r->times;
        if (!tsg_cuda_enter(r->cuda) || (on && !ptr && !tsg_cuda_ok(r->cuda, r->cuda->memory_alloc(&ptr, size), "cuMemAlloc")) ||
            (on && !tsg_cuda_ok(r->cuda, r->cuda->memset_d8(ptr, 0, size), "cuMemsetD8"))) {
            return TSG_E_MEMORY;
        }
        r->times = (struct tsg_dev_time *) ptr;
        r->epoch += was_on != on;
    }
    profile->on = on;
    return TSG_OK;
}

enum tsg_status tsg_pager_set_profile(struct tsg_pager * pager, bool on) {
    if (!pager->ready) {
        return tsg_fail(TSG_E_STATE, "the model is not loaded yet");
    }
    tsg_pager_lock(pager);
    const enum tsg_status status = take_times(pager, on);
    tsg_pager_unlock(pager);
    return status;
}

enum tsg_status tsg_pager_layer_time(struct tsg_pager * pager, int32_t layer, struct tsg_layer_time * out) {
    if (!pager->profile.on || layer < 0 || layer > pager->n_layers) {
        return tsg_fail(TSG_E_ARGUMENT, pager->profile.on ? "there is no layer %d" : "no times are taken", layer);
    }
    tsg_pager_lock(pager);
    struct tsg_resident * r  = pager->resident;
    bool                  ok = true;
    *out                     = pager->profile.layers[layer];
    if (r) {
        struct tsg_dev_time time = { 0 };
        tsg_engine_wait(pager);
        ok = tsg_cuda_enter(r->cuda) && tsg_cuda_ok(r->cuda, r->cuda->copy_to_host(&time, (tsg_cu_ptr) &r->times[layer], sizeof(time)), "cuMemcpyDtoH");
        out->graphs += time.sum.graphs;
        for (int32_t i = TSG_ATTENTION; i <= TSG_EXPERTS; i++) {
            out->ns[i] += time.sum.ns[i];
        }
    }
    tsg_pager_unlock(pager);
    return ok ? TSG_OK : TSG_E_STATE;
}

void tsg_profile_free(struct tsg_pager * pager) {
    free(pager->profile.layers);
}
