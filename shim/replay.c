// replay.c - decode without the host: one CUDA graph per token in which resident.cu looks up, evicts and copies.
//
// A graph that llama.cpp hands over for the second time is captured: our stream begins, the inner stream joins by an event, the graph runs in pieces as the
// host-driven engine would run it, with our kernel between them, and the streams join again. From then on a token costs one launch.
#include "resident.h"

#include "engine.h"

// Enough to fill the link; more in the rest would slow the matmul beside it.
#define STEP_BLOCKS 32
#define REST_BLOCKS 16

// ---- one graph ----

static tsg_cu_event cu(ggml_backend_event_t event) {
    return event->context;
}

bool tsg_ours_waits(struct tsg_engine * e, tsg_cu_stream stream, int event) {
    const struct tsg_cuda * cuda = e->pager->resident->cuda;
    ggml_backend_event_record(e->event[event], e->inner);
    return tsg_cuda_ok(cuda, cuda->stream_wait(stream, cu(e->event[event]), 0), "cuStreamWaitEvent");
}

bool tsg_inner_waits(struct tsg_engine * e, tsg_cu_stream stream, int event) {
    const struct tsg_cuda * cuda = e->pager->resident->cuda;
    if (!tsg_cuda_ok(cuda, cuda->event_record(cu(e->event[event]), stream), "cuEventRecord")) {
        return false;
    }
    ggml_backend_event_wait(e->inner, e->event[event]);
    return true;
}

// tsg_step, which the layer's first matmul waits for, and beside it tsg_rest, which the last one does.
static bool launch_step(struct tsg_engine * e, const struct tsg_step * step) {
    struct tsg_resident *   r        = e->pager->resident;
    const struct tsg_cuda * cuda     = r->cuda;
    tsg_cu_ptr              ids      = (tsg_cu_ptr) step->ids->data;
    int32_t                 stride   = (int32_t) (step->ids->nb[1] / sizeof(int32_t));
    int32_t                 n_used   = (int32_t) step->ids->ne[0];
    int32_t                 n_tokens = (int32_t) step->ids->ne[1];
    tsg_cu_ptr              out      = (tsg_cu_ptr) e->slot_ids->data;
    int32_t                 blocks   = STEP_BLOCKS;
    struct tsg_dev_time *   time     = tsg_profile_of(e, step->layer->index);
    void * step_params[] = { &r->pool[step->layer->pool], &r->layer[step->layer->index], &ids, &stride, &n_used, &n_tokens, &r->link, &time, &out };
    void * rest_params[] = { &r->pool[step->layer->pool], &r->layer[step->layer->index], &ids, &stride, &n_used, &n_tokens, &r->link, &time, &blocks };
    return tsg_ours_waits(e, e->stream, TSG_EV_STEP_IN) &&
           tsg_cuda_ok(cuda, cuda->event_record(cu(e->event[TSG_EV_REST_IN]), e->stream), "cuEventRecord") &&
           tsg_cuda_ok(cuda, cuda->stream_wait(e->side, cu(e->event[TSG_EV_REST_IN]), 0), "cuStreamWaitEvent") &&
           tsg_cuda_ok(cuda, cuda->launch(cuda->step, STEP_BLOCKS, 1, 1, TSG_STEP_THREADS, 1, 1, 0, e->stream, step_params, NULL), "cuLaunchKernel") &&
           tsg_cuda_ok(cuda, cuda->launch(cuda->rest, REST_BLOCKS, 1, 1, TSG_STEP_THREADS, 1, 1, 0, e->side, rest_params, NULL), "cuLaunchKernel") &&
           tsg_cuda_ok(cuda, cuda->event_record(cu(e->event[TSG_EV_REST_OUT]), e->side), "cuEventRecord");
}

// Behind both: the inner stream does not wait for it.
static bool launch_commit(struct tsg_engine * e, const struct tsg_step * step, bool publish) {
    struct tsg_resident * r     = e->pager->resident;
    int32_t               first = step->layer->first;
    uint64_t              bytes = tsg_layer_expert_bytes(step->layer);
    int32_t               show  = publish;
    void * params[] = { &r->pool[step->layer->pool], &first, &bytes, &show };
    return tsg_cuda_ok(r->cuda, r->cuda->stream_wait(e->stream, cu(e->event[TSG_EV_REST_OUT]), 0), "cuStreamWaitEvent") &&
           tsg_cuda_ok(r->cuda, r->cuda->launch(r->cuda->commit, 1, 1, 1, TSG_COMMIT_THREADS, 1, 1, 0, e->stream, params, NULL), "cuLaunchKernel");
}

static bool is_last_of_pool(const struct tsg_engine * e, int i) {
    for (int j = i + 1; j < e->graph.n_steps; j++) {
        if (e->graph.steps[j].layer->pool == e->graph.steps[i].layer->pool && ggml_nelements(e->graph.steps[j].ids) > 0) {
            return false;
        }
    }
    return true;
}

// The nodes from *done to the layer's last matmul, with our kernels among them.
static enum ggml_status issue_step(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, bool publish, int * done) {
    enum ggml_status status = tsg_engine_compute_plain(e, graph, *done, step->first);
    if (status != GGML_STATUS_SUCCESS) {
        return status;
    }
    tsg_engine_shape_ids(e, step);
    if (!launch_step(e, step) || !tsg_inner_waits(e, e->stream, TSG_EV_STEP_OUT) || !launch_commit(e, step, publish) ||
        !tsg_graph_use_slots(&e->graph, graph, step, tsg_engine_pool(e, step), e->slot_ids, e->repeats)) {
        return GGML_STATUS_FAILED;
    }
    status = tsg_engine_compute_plain(e, graph, step->first, step->down);
    ggml_backend_event_wait(e->inner, e->event[TSG_EV_REST_OUT]);
    *done = step->down;
    if (status == GGML_STATUS_SUCCESS && tsg_profile_of(e, step->layer->index)) {
        status = tsg_engine_compute_plain(e, graph, step->down, step->done);
        *done  = step->done;
        return status == GGML_STATUS_SUCCESS && !tsg_profile_stamp(e, step->layer->index, TSG_STAMP_LAYER) ? GGML_STATUS_FAILED : status;
    }
    return status;
}

// The graph in pieces with our kernels between them; issued to the device, or into a capture.
static enum ggml_status issue(struct tsg_engine * e, struct ggml_cgraph * graph, struct tsg_counts * counts) {
    const int32_t output = e->pager->n_layers;
    int           done   = 0;
    if (!tsg_profile_stamp(e, output, TSG_STAMP_BEGIN)) {
        return GGML_STATUS_FAILED;
    }
    if (!tsg_engine_use_resident(e, graph, counts)) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    for (int i = 0; i < e->graph.n_steps; i++) {
        const struct tsg_step * step = &e->graph.steps[i];
        if (!tsg_engine_brings(e, step)) {
            continue;
        }
        const enum ggml_status status = issue_step(e, graph, step, is_last_of_pool(e, i), &done);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
    }
    const enum ggml_status status = tsg_engine_compute_plain(e, graph, done, graph->n_nodes);
    return status == GGML_STATUS_SUCCESS && !tsg_profile_stamp(e, output, TSG_STAMP_OUTPUT) ? GGML_STATUS_FAILED : status;
}

// ---- captured graphs ----

static struct tsg_replay * find_replay(struct tsg_engine * e, uint64_t uid) {
    for (int i = 0; i < TSG_MAX_REPLAYS; i++) {
        if (e->replays[i].uid == uid && e->replays[i].epoch == e->pager->resident->epoch) {
            return &e->replays[i];
        }
    }
    return NULL;
}

// A place for a new graph: an empty one, or the one that was not used for longest.
static struct tsg_replay * make_replay(struct tsg_engine * e, uint64_t uid) {
    struct tsg_replay * oldest = &e->replays[0];
    for (int i = 1; i < TSG_MAX_REPLAYS; i++) {
        oldest = e->replays[i].used < oldest->used ? &e->replays[i] : oldest;
    }
    if (oldest->exec) {
        const struct tsg_cuda * cuda = e->pager->resident->cuda;
        cuda->stream_synchronize(e->stream);
        cuda->exec_destroy(oldest->exec);
    }
    *oldest = (struct tsg_replay) { .uid = uid, .epoch = e->pager->resident->epoch, .used = e->n_graphs };
    return oldest;
}

static bool launch(struct tsg_engine * e, const struct tsg_replay * replay) {
    const struct tsg_cuda * cuda = e->pager->resident->cuda;
    return tsg_ours_waits(e, e->stream, TSG_EV_LAUNCH_IN) && tsg_cuda_ok(cuda, cuda->graph_launch(replay->exec, e->stream), "cuGraphLaunch") &&
           tsg_inner_waits(e, e->stream, TSG_EV_LAUNCH_OUT);
}

// Makes a captured graph ready to launch. llama.cpp grows its graph every 256 tokens and then never comes back to the old one, so that one is rewritten if it
// has the same shape and the driver can: it takes a fraction of the time.
static bool make_exec(struct tsg_engine * e, struct tsg_replay * replay, tsg_cu_graph captured) {
    const struct tsg_cuda * cuda = e->pager->resident->cuda;
    struct tsg_replay *     last = NULL;
    struct tsg_cu_update    info;
    for (int i = 0; i < TSG_MAX_REPLAYS; i++) {
        struct tsg_replay * other = &e->replays[i];
        if (other->exec && other->rows == replay->rows && other->epoch == replay->epoch && (!last || other->used > last->used)) {
            last = other;
        }
    }
    if (last && cuda->exec_update && cuda->exec_update(last->exec, captured, &info) == 0) {
        replay->exec = last->exec;
        *last        = (struct tsg_replay) { 0 };
        return true;
    }
    return tsg_cuda_ok(cuda, cuda->graph_instantiate(&replay->exec, captured, 0), "cuGraphInstantiate");
}

static bool capture(struct tsg_engine * e, struct ggml_cgraph * graph, struct tsg_replay * replay) {
    const struct tsg_cuda * cuda     = e->pager->resident->cuda;
    tsg_cu_graph            captured = NULL;
    if (!tsg_cuda_ok(cuda, cuda->stream_begin_capture(e->stream, TSG_CU_CAPTURE_RELAXED), "cuStreamBeginCapture")) {
        return false;
    }
    bool ok = tsg_inner_waits(e, e->stream, TSG_EV_CAPTURE_IN) && issue(e, graph, &replay->counts) == GGML_STATUS_SUCCESS &&
              tsg_ours_waits(e, e->stream, TSG_EV_CAPTURE_OUT);
    ok      = tsg_cuda_ok(cuda, cuda->stream_end_capture(e->stream, &captured), "cuStreamEndCapture") && ok;
    e->pager->notes.edges_moved += ok ? (uint64_t) tsg_edges_relax(cuda, captured) : 0;
    ok = ok && make_exec(e, replay, captured);
    if (captured) {
        cuda->graph_destroy(captured);
    }
    if (!ok) {
        replay->exec  = NULL;
        e->no_capture = true;
        e->pager->notes.capture_failed++;
    } else {
        e->pager->notes.captures++;
    }
    return ok;
}

// Where weights are not quantised, an expert's or an adapter's, ggml-cuda may multiply through a path that synchronises the stream, which a capture does not
// survive.
static bool capturable(const struct ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor * node = graph->nodes[i];
        if (node->op == GGML_OP_MUL_MAT_ID && !ggml_is_quantized(node->src[0]->type)) {
            return false;
        }
    }
    return true;
}

bool tsg_resident_can(const struct tsg_engine * e, int64_t n_tokens) {
    const struct tsg_resident * r = e->pager->resident;
    if (!r || n_tokens > tsg_engine_slot_tokens(e)) {
        return false;
    }
    for (int i = 0; i < e->graph.n_steps; i++) {
        const struct tsg_step * step = &e->graph.steps[i];
        const struct tsg_pool * pool = &e->pager->pools[step->layer->pool];
        const int64_t           rows = ggml_nelements(step->ids);
        if (!pool->resident && (rows > TSG_STEP_THREADS || rows > pool->n_slots - pool->slots.n_pinned)) {
            return false;
        }
    }
    return true;
}

bool tsg_resident_replay(struct tsg_engine * e, struct ggml_cgraph * graph) {
    struct tsg_resident * r = e->pager->resident;
    if (!r || !graph->uid) {
        return false;
    }
    struct tsg_replay * replay = find_replay(e, graph->uid);
    if (!replay || !replay->exec || !tsg_cuda_enter(r->cuda) || !tsg_resident_to_device(e->pager) || replay->rows > r->free_rows || !launch(e, replay)) {
        return false;
    }
    struct tsg_counts * counts = &e->pager->counts[TSG_DECODE];
    counts->graphs++;
    counts->lookups += replay->counts.lookups;  // those of pools that hold everything: the others are counted on the device
    counts->hits += replay->counts.hits;
    replay->used = e->n_graphs;
    e->pager->notes.replays++;
    return true;
}

enum ggml_status tsg_resident_decode(struct tsg_engine * e, struct ggml_cgraph * graph) {
    struct tsg_resident * r = e->pager->resident;
    if (!tsg_cuda_enter(r->cuda) || !tsg_resident_to_device(e->pager)) {
        return GGML_STATUS_FAILED;
    }
    if (graph->uid && !e->no_capture && capturable(graph)) {
        struct tsg_replay * replay = find_replay(e, graph->uid);
        if (replay) {
            for (int i = 0; i < e->graph.n_steps; i++) {
                const int64_t rows = ggml_nelements(e->graph.steps[i].ids);
                replay->rows       = rows > replay->rows ? rows : replay->rows;
            }
            ggml_backend_synchronize(e->inner);  // nothing may be pending on a stream that joins a capture
            const bool captured = capture(e, graph, replay);
            tsg_graph_restore(&e->graph);
            if (captured) {
                e->pager->counts[TSG_DECODE].graphs--;  // the replay counts it
                return tsg_resident_replay(e, graph) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
            }
        } else {
            make_replay(e, graph->uid);  // seen once: the device's allocator warms up uncaptured
        }
    }
    return issue(e, graph, &e->pager->counts[TSG_DECODE]);
}

bool tsg_resident_engine_init(struct tsg_engine * e) {
    struct tsg_resident * r = e->pager->resident;
    if (!r || e->stream) {
        return true;
    }
    if (!tsg_cuda_enter(r->cuda) || !tsg_cuda_ok(r->cuda, r->cuda->stream_create(&e->stream, TSG_CU_STREAM_NON_BLOCKING), "cuStreamCreate") ||
        !tsg_cuda_ok(r->cuda, r->cuda->stream_create(&e->side, TSG_CU_STREAM_NON_BLOCKING), "cuStreamCreate")) {
        return false;
    }
    for (size_t i = 0; i < sizeof(e->event) / sizeof(e->event[0]); i++) {
        e->event[i] = ggml_backend_event_new(e->pager->inner);
    }
    return true;
}

void tsg_resident_engine_wait(struct tsg_engine * e) {
    const struct tsg_resident * r = e->pager->resident;
    if (r && e->stream) {
        r->cuda->context_set(r->cuda->context);
        r->cuda->stream_synchronize(e->stream);
        r->cuda->stream_synchronize(e->side);
    }
}

void tsg_resident_engine_forget(struct tsg_engine * e) {
    const struct tsg_resident * r = e->pager->resident;
    if (r) {
        tsg_cuda_enter(r->cuda);
    }
    for (int i = 0; i < TSG_MAX_REPLAYS; i++) {
        if (r && e->replays[i].exec) {
            r->cuda->exec_destroy(e->replays[i].exec);
        }
        e->replays[i] = (struct tsg_replay) { 0 };
    }
}

void tsg_resident_engine_free(struct tsg_engine * e) {
    struct tsg_resident * r = e->pager->resident;
    if (!r || !e->stream) {
        return;
    }
    tsg_resident_engine_wait(e);
    tsg_resident_engine_forget(e);
    for (size_t i = 0; i < sizeof(e->event) / sizeof(e->event[0]); i++) {
        ggml_backend_event_free(e->event[i]);
    }
    r->cuda->stream_destroy(e->stream);
    r->cuda->stream_destroy(e->side);
    e->stream = e->side = NULL;
}
