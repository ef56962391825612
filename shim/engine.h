// engine.h - one stream of one model: what engine.c and step.c (host-driven), resident.c (device-resident decode) and stream.c (overlapped prefill) share.
#pragma once

#include "coexec.h"
#include "cuda.h"
#include "graph.h"
#include "resident.h"

// Events between our stream and the inner one. Those inside a capture are not used outside of it.
enum tsg_event {
    TSG_EV_STEP_IN,
    TSG_EV_STEP_OUT,
    TSG_EV_REST_IN,
    TSG_EV_REST_OUT,
    TSG_EV_TIME,
    TSG_EV_LAUNCH_IN,
    TSG_EV_LAUNCH_OUT,
    TSG_EV_CAPTURE_IN,
    TSG_EV_CAPTURE_OUT,
    TSG_EV_STAGE_FREE,   // and the next: one per stage
    TSG_EV_STAGE_READY = TSG_EV_STAGE_FREE + 2,
    TSG_EV_SIDE_READY  = TSG_EV_STAGE_READY + 2,
    TSG_N_EVENTS       = TSG_EV_SIDE_READY + 2,
};

#define TSG_MAX_REPLAYS 8  // captured graphs kept per context: llama.cpp changes its graph about every 256 tokens, and per batch shape

// What a pager has on its CUDA device.
struct tsg_resident {
    struct tsg_cuda *        cuda;
    bool                     on_device;    // where the slot maps are
    uint64_t                 ps_per_byte;  // a slower link for what-if runs, 0 = the real one
    tsg_cu_ptr               link;         // the same on the device, and behind it room for a time stamp
    struct tsg_dev_pool *    pool;         // [n_pools] what the kernels get; empty for pools that hold everything
    struct tsg_dev_layer *   layer;        // [n_layers]
    struct tsg_dev_counts ** page;         // [n_pools] mapped host memory that the kernel writes
    struct tsg_dev_counts *  base;         // [n_pools] what was on the page at the last reset
    int64_t                  free_rows;    // the smallest number of unpinned slots of a pool
    struct tsg_dev_time *    times;        // [n_layers + 1] on the device, NULL unless the time of layers is taken
    uint64_t                 epoch;        // of what captured graphs have built in
};

// A graph that was captured, by the number that llama.cpp's scheduler gave it.
struct tsg_replay {
    uint64_t    uid;
    uint64_t    epoch;
    uint64_t    used;  // engine->n_graphs when it was used last
    int64_t     rows;  // ids of its largest step
    tsg_cu_exec exec;  // NULL: seen once, runs uncaptured
    struct tsg_counts counts;  // lookups in pools that hold everything, per run
};

struct tsg_engine {
    struct tsg_pager *    pager;
    struct tsg_engine *   next;  // of the same pager
    ggml_backend_t        inner;
    struct tsg_graph      graph;
    uint64_t              n_graphs;
    ggml_backend_buffer_t host;       // page-locked staging for ids
    int32_t *             ids;        // [n_tokens][n_used] the router's choice
    int32_t *             slot_rows;  // [n_tokens][n_used] the same as slots, source of the async copy
    size_t                ids_cap;    // elements of each
    struct ggml_context * ctx;        // slot_ids, repeats
    ggml_backend_buffer_t buffer;
    struct ggml_tensor *  slot_ids;                // [n_used, n_tokens] on the device
    struct ggml_tensor *  repeats[TSG_MAX_PARTS];  // scratch for scales, [n_slots x tokens] of the largest pool there can be; NULL if no pool has scales
    struct tsg_corun *    corun;                   // misses on the CPU, NULL until the first

    bool                  timing;                  // the host-driven engine takes the times of the running graph

    // CUDA only
    tsg_cu_stream        stream;     // ours: joined with the inner one by events
    tsg_cu_stream        side;       // prefill: copies on the device beside those over the link
    ggml_backend_event_t event[TSG_N_EVENTS];
    uint64_t             flip;       // see tsg_engine_compute_plain()
    struct tsg_replay    replays[TSG_MAX_REPLAYS];
    bool                 no_capture;  // it failed once
    int32_t              timed;       // the layer whose end was stamped last

    // one step of the host-driven engine
    int32_t         n_distinct;
    int32_t         distinct[TSG_MAX_EXPERTS];  // experts wanted
    int32_t         count[TSG_MAX_EXPERTS];     // tokens that want expert e
    int32_t         global[TSG_MAX_EXPERTS];    // distinct, as ids of the pool
    int32_t         slot[TSG_MAX_EXPERTS];      // their slots
    int32_t         slot_of[TSG_MAX_EXPERTS];   // by expert
    struct tsg_load loads[TSG_MAX_EXPERTS];
};

// engine.c
int64_t          tsg_engine_slot_tokens(const struct tsg_engine * e);  // a graph of up to so many tokens may go through slots
int64_t          tsg_engine_step_tokens(const struct tsg_engine * e, const struct tsg_step * step);  // the same for one step
bool             tsg_engine_brings(const struct tsg_engine * e, const struct tsg_step * step);  // whether experts have to be brought for this step
bool             tsg_engine_use_resident(struct tsg_engine * e, struct ggml_cgraph * graph, struct tsg_counts * counts);  // steps whose experts are all there
enum ggml_status tsg_engine_compute_range(struct tsg_engine * e, struct ggml_cgraph * graph, int from, int to);
// The same without ggml-cuda's own CUDA graphs, which must stay out of a capture: a padding byte of the first node differs from call to call, so its
// warm-up never completes.
enum ggml_status tsg_engine_compute_plain(struct tsg_engine * e, struct ggml_cgraph * graph, int from, int to);

// step.c
struct tsg_pool * tsg_engine_pool(struct tsg_engine * e, const struct tsg_step * step);
void              tsg_engine_shape_ids(struct tsg_engine * e, const struct tsg_step * step);  // slot_ids as [n_used, n_tokens] of this step
bool              tsg_engine_read_ids(struct tsg_engine * e, const struct tsg_step * step);   // waits for the inner backend
bool              tsg_engine_use_slots(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step);  // those in e->slot
bool              tsg_engine_run_step(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, enum tsg_phase phase);

// layers.c: a layer that decode computes from a prefill stage. Computes the graph up to *done if a prompt has used the stage since.
enum ggml_status tsg_layers_use_stage(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, int * done);

// resident.c: where the slot maps are. The pager is locked.
bool tsg_resident_to_device(struct tsg_pager * pager);
bool tsg_resident_show_maps(struct tsg_pager * pager);  // copies slot_of for kernels that only read it; the maps stay on the host
// For what-if runs: all that the stream does between a call with `begin` and one without takes at least as long as `bytes` would over the slower link.
bool tsg_resident_delay(const struct tsg_pager * pager, tsg_cu_stream stream, bool begin, uint64_t bytes);

// replay.c
bool             tsg_resident_engine_init(struct tsg_engine * e);  // false: no memory for streams and events
void             tsg_resident_engine_free(struct tsg_engine * e);
void             tsg_resident_engine_forget(struct tsg_engine * e);  // captured graphs: the pools move
void             tsg_resident_engine_wait(struct tsg_engine * e);  // for our streams: bookkeeping runs behind what the inner one waits for
bool             tsg_ours_waits(struct tsg_engine * e, tsg_cu_stream stream, int event);   // until the inner stream has come to here
bool             tsg_inner_waits(struct tsg_engine * e, tsg_cu_stream stream, int event);  // the other way round
bool             tsg_resident_replay(struct tsg_engine * e, struct ggml_cgraph * graph);   // true: it was captured before and runs now
bool             tsg_resident_can(const struct tsg_engine * e, int64_t n_tokens);
enum ggml_status tsg_resident_decode(struct tsg_engine * e, struct ggml_cgraph * graph);

// profile.c
void tsg_profile_start(struct tsg_engine * e, enum tsg_phase phase);  // the host-driven engine's stretches follow each other from here, if they are timed
void tsg_profile_mark(struct tsg_engine * e, int32_t layer, enum tsg_stretch stretch);  // one ends
struct tsg_dev_time * tsg_profile_of(const struct tsg_engine * e, int32_t layer);       // on the device; NULL unless the time of layers is taken
bool tsg_profile_stamp(struct tsg_engine * e, int32_t layer, enum tsg_stamp what);      // the inner stream has come to here

// stream.c
bool             tsg_stream_can(const struct tsg_engine * e);  // the slot maps are on the host
enum ggml_status tsg_stream_prefill(struct tsg_engine * e, struct ggml_cgraph * graph, struct tsg_counts * counts);
