// stream.c - prefill with the copies beside the computation.
//
// A long prompt touches nearly every expert of every layer, so nobody asks which: each layer is brought whole into a stage, in the model's own order, while
// the layer before it computes. Experts that are resident come from their slots, only the rest crosses the link. Slots are not written, so what decode had
// gathered survives. Two stages take turns; the copies run on our stream, two events per stage keep order with the inner one.
#include "engine.h"

#define STAGE_BLOCKS 4  // per expert

// What is not resident of one weight crosses the link, neighbours in one piece.
static bool copy_over_link(struct tsg_engine * e, const struct tsg_layer * layer, const struct tsg_slots * slots, const struct tsg_weight * w,
                           struct ggml_tensor * stage, struct tsg_counts * counts) {
    const struct tsg_cuda * cuda = e->pager->resident->cuda;
    for (int32_t x = 0, end; x < layer->n_expert; x = end) {
        end = x + 1;
        if (slots->slot_of[layer->first + x] >= 0) {
            continue;
        }
        while (end < layer->n_expert && slots->slot_of[layer->first + end] < 0) {
            end++;
        }
        const size_t at = (size_t) x * w->bytes, size = (size_t) (end - x) * w->bytes;
        if (!tsg_cuda_ok(cuda, cuda->copy_to_device_async((tsg_cu_ptr) stage->data + at, w->host + at, size, e->stream), "cuMemcpyHtoDAsync")) {
            return false;
        }
        counts->bytes_link += size;
    }
    return true;
}

// What is resident comes from its slots, in one launch on the side stream.
static bool copy_on_device(struct tsg_engine * e, const struct tsg_layer * layer, const struct tsg_pool * pool, int k) {
    const struct tsg_resident * r     = e->pager->resident;
    struct tsg_dev_stage        stage = { .n_banks = layer->n_parts };
    for (int32_t p = 0; p < layer->n_parts; p++) {
        stage.slots[p] = pool->slot[p]->data;
        stage.stage[p] = pool->stage[k][p]->data;
        stage.bytes[p] = layer->weight[p].bytes;
    }
    const int32_t * slot_of  = r->pool[layer->pool].slot_of + layer->first;
    void *          params[] = { &stage, &slot_of };
    return tsg_cuda_ok(r->cuda, r->cuda->launch(r->cuda->stage, STAGE_BLOCKS, (unsigned) layer->n_expert, 1, TSG_STEP_THREADS, 1, 1, 0, e->side, params, NULL),
                       "cuLaunchKernel");
}

// Starts the copies of a step into stage `k`, which is free when the step before the last has computed.
static bool fill_stage(struct tsg_engine * e, const struct tsg_step * step, int k, bool reused, struct tsg_counts * counts) {
    const struct tsg_layer * layer = step->layer;
    struct tsg_pool *        pool  = tsg_engine_pool(e, step);
    const struct tsg_cuda *  cuda  = e->pager->resident->cuda;
    const tsg_cu_event free = e->event[TSG_EV_STAGE_FREE + k]->context;
    if (reused && (!tsg_cuda_ok(cuda, cuda->stream_wait(e->stream, free, 0), "cuStreamWaitEvent") ||
                   !tsg_cuda_ok(cuda, cuda->stream_wait(e->side, free, 0), "cuStreamWaitEvent"))) {
        return false;
    }
    pool->held[k] = NULL;
    const uint64_t before = counts->bytes_link;
    if (!tsg_resident_delay(e->pager, e->stream, true, 0)) {
        return false;
    }
    size_t bytes = 0;
    for (int32_t p = 0; p < layer->n_parts; p++) {
        bytes += layer->weight[p].bytes;
        if (!copy_over_link(e, layer, &pool->slots, &layer->weight[p], pool->stage[k][p], counts)) {
            return false;
        }
    }
    int32_t resident = 0;
    for (int32_t x = 0; x < layer->n_expert; x++) {
        resident += pool->slots.slot_of[layer->first + x] >= 0;
    }
    if (resident && !copy_on_device(e, layer, pool, k)) {
        return false;
    }
    counts->bytes_device += (uint64_t) resident * bytes;
    counts->lookups += (uint64_t) layer->n_expert;
    counts->hits    += (uint64_t) resident;
    counts->misses  += (uint64_t) (layer->n_expert - resident);
    counts->streamed++;
    return tsg_resident_delay(e->pager, e->stream, false, counts->bytes_link - before) &&
           tsg_cuda_ok(cuda, cuda->event_record(e->event[TSG_EV_STAGE_READY + k]->context, e->stream), "cuEventRecord") &&
           tsg_cuda_ok(cuda, cuda->event_record(e->event[TSG_EV_SIDE_READY + k]->context, e->side), "cuEventRecord");
}

// Worth it once the pool is full: before, the host-driven engine leaves the experts that a prompt wants most in free slots.
bool tsg_stream_can(const struct tsg_engine * e) {
    if (!e->pager->resident) {
        return false;
    }
    for (int i = 0; i < e->graph.n_steps; i++) {
        const struct tsg_step * step = &e->graph.steps[i];
        const struct tsg_pool * pool = &e->pager->pools[step->layer->pool];
        const bool resident = tsg_layer_is_resident(e->pager, step->layer);
        if (!resident && (pool->n_stages < 2 || pool->slots.n_used < pool->n_slots)) {
            return false;
        }
        // a few tokens want few experts: cheaper to ask which
        if (!resident && ggml_nelements(step->ids) > 0 && step->ids->ne[1] > 1 && ggml_nelements(step->ids) < step->layer->n_expert) {
            return false;
        }
    }
    return true;
}

enum ggml_status tsg_stream_prefill(struct tsg_engine * e, struct ggml_cgraph * graph, struct tsg_counts * counts) {
    const struct tsg_step * steps = e->graph.steps;
    const int               n     = e->graph.n_steps;
    if (!tsg_cuda_enter(e->pager->resident->cuda) || !tsg_resident_show_maps(e->pager) || !tsg_ours_waits(e, e->stream, TSG_EV_LAUNCH_IN) ||
        !tsg_ours_waits(e, e->side, TSG_EV_LAUNCH_IN)) {
        return GGML_STATUS_FAILED;
    }
    int done = 0, filled = 0, used = 0;  // steps whose copies were started, steps that computed
    if (!tsg_engine_use_resident(e, graph, counts)) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    for (int i = 0; i < n; i++) {
        if (!tsg_engine_brings(e, &steps[i])) {
            continue;
        }
        // copies for this step, if the last one did not start them, and for the next
        for (int j = i, ahead = 0; j < n && ahead < 2; j++) {
            if (!tsg_engine_brings(e, &steps[j])) {
                continue;
            }
            if (used + ahead >= filled) {
                if (!fill_stage(e, &steps[j], filled & 1, filled >= 2, counts)) {
                    return GGML_STATUS_FAILED;
                }
                filled++;
            }
            ahead++;
        }
        const int         k    = used & 1;
        struct tsg_pool * pool = tsg_engine_pool(e, &steps[i]);
        for (int32_t p = 0; p < pool->n_parts; p++) {
            pool->stage[k][p]->ne[2] = steps[i].layer->n_expert;
        }
        enum ggml_status status = tsg_engine_compute_range(e, graph, done, steps[i].first);
        if (status != GGML_STATUS_SUCCESS || !tsg_graph_use_experts(&e->graph, graph, &steps[i], pool->stage[k])) {
            return status != GGML_STATUS_SUCCESS ? status : GGML_STATUS_ALLOC_FAILED;
        }
        ggml_backend_event_wait(e->inner, e->event[TSG_EV_STAGE_READY + k]);
        ggml_backend_event_wait(e->inner, e->event[TSG_EV_SIDE_READY + k]);
        done   = steps[i].done;
        status = tsg_engine_compute_range(e, graph, steps[i].first, done);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        ggml_backend_event_record(e->event[TSG_EV_STAGE_FREE + k], e->inner);
        used++;
    }
    e->pager->notes.overlapped++;
    return tsg_engine_compute_range(e, graph, done, graph->n_nodes);
}
