// pager.h - the pager: everything the shim knows of one model.
//
//   api.c      errors, the ABI guard, devices
//   pager.c    life of a pager
//   group.c    a model on several devices: what their pagers share
//   experts.c  counters, and experts by hand
//   buffer.c   the expert buffer type: addresses without memory, which llama.cpp's loader believes to fill
//   host.c     the host pool: the ladder of ways to the device; host.h says which
//   map.c      the files
//   pin.c      page-locking for it
//   ring.c     copies from pageable memory
//   device.c   the proxy device that llama.cpp is given
//   backend.c  its backend: forwards to the inner one, graphs go through the engine
//   engine.c   the host-driven engine: cuts a graph at the expert layers, makes routed experts resident, points the nodes at slots
//   step.c     one step of it
//   coexec.c   the same with two computers: misses on the CPU
//   chain.c    what the CPU computes of a layer: found in the graph, cloned
//   cpu.c      the thread that does
//   admit.c    which of these misses enter the pool
//   layers.c   whole layers on the device instead, the others on the CPU
//   rate.c     how fast the CPU computes experts
//   graph.c    finds the expert layers in a graph, patches nodes and restores them
//   resident.c slot maps on a CUDA device; resident.cu the kernel that uses them
//   replay.c   device-resident decode: the whole graph with that kernel, captured
//   edges.c    small liberties in the captured graph
//   stream.c   overlapped prefill
//   profile.c  where the time goes
//   measure.c  what this machine can do, without a model
//   cuda.c     the CUDA driver, found at run time
//   resize.c   pools of another size while the model is open; survivors.c says who stays
//   pool.c     device memory of the slots and copies into it
//   slots.c    which expert lies in which slot; policy.h says which one leaves
#pragma once

#include "cpu.h"
#include "ggml-abi.h"
#include "host.h"
#include "slots.h"

// One weight of a layer, [ne0, ne1, n_expert].
struct tsg_weight {
    char            name[GGML_MAX_NAME];
    char            bias_name[GGML_MAX_NAME];   // "" = none
    char            scale_name[GGML_MAX_NAME];  // "" = none
    enum ggml_type  type;
    int64_t         ne0;
    int64_t         ne1;
    size_t          bytes;    // of one expert
    float *         bias;     // [n_expert][ne1], page-locked
    float *         scale;    // [n_expert], page-locked
    int32_t         shard;    // where it lies: index of the file,
    uint64_t        offset;   // and byte in it
    const uint8_t * host;     // [n_expert][bytes] in the host pool, NULL until the pager is ready
    const uint8_t * before;   // where host was, while copies are made that may have to be undone
    void *          copy;     // handle of a page-locked copy, NULL: host is in the mapping
    const void *    place;    // the address that the loader knows, NULL before it has placed the tensor
    size_t          arrived;  // bytes that the loader has offered
    bool            changed;  // and some were not those of the file
    int32_t         part;
    struct tsg_layer * layer;
};

struct tsg_layer {
    int32_t            index;  // in the pager
    int32_t            pool;
    int32_t            first;  // id in the pool of this layer's expert 0
    int32_t            n_expert;
    int32_t            n_used;
    int32_t            n_parts;
    struct tsg_weight  weight[TSG_MAX_PARTS];
    struct ggml_tensor resident[TSG_MAX_PARTS];  // this layer's part of the slots, if all its experts lie there in order, [ne0, ne1, n_expert]
    bool               whole;  // they do, in a pool that does not hold everything
    int32_t            stage;  // decode computes it from this prefill stage, which then holds all of it; -1: from slots
};

// Slots for experts of one layout. A slot tensor has one slot more in memory than ne[2] says: CUDA's MMQ reads past the last expert, and what it finds
// there, like every slot not yet filled, must not be a NaN pattern: the memory is zeroed.
struct tsg_pool {
    struct tsg_slots        slots;
    int32_t                 n_slots;
    int32_t                 n_experts;
    int32_t                 n_layers;
    int32_t                 max_expert;  // experts of its largest layer: the width of the stage
    int32_t                 max_used;
    int32_t                 n_parts;
    bool                    resident;  // every expert has a slot, slot = id: nothing ever moves
    const struct tsg_weight * layout;    // first layer's weights
    struct tsg_ring *       ring;      // the way of its experts to the device, NULL: straight
    struct ggml_context *   ctx;
    struct ggml_context *   stage_ctx;
    int32_t                 want_stages;  // 2 let the next layer be copied while one computes
    int32_t                 n_stages;     // the same; 0 if resident
    int32_t *               before;    // [n_slots] what lay in the slots before whole layers did; NULL: none do
    const struct tsg_layer * held[TSG_MAX_STAGES];  // the layer that a stage holds for decode; NULL: prefill has used it
    ggml_backend_buffer_t   buffer;
    ggml_backend_buffer_t   stage_buffer;
    struct ggml_tensor *    slot[TSG_MAX_PARTS];   // [ne0, ne1, n_slots]
    struct ggml_tensor *    bias[TSG_MAX_PARTS];   // [ne1, n_slots] or NULL
    struct ggml_tensor *    scale[TSG_MAX_PARTS];  // [n_slots] or NULL
    struct ggml_tensor *    stage[TSG_MAX_STAGES][TSG_MAX_PARTS];  // [ne0, ne1, max_expert]: one layer in the model's own order
};

struct tsg_engine;
struct tsg_resident;

// Times of the host-driven engine.
struct tsg_profile {
    bool                    on;
    uint64_t                since;  // where the running stretch began
    struct tsg_layer_time * layers; // [n_layers + 1]
};

struct tsg_pager {
    struct ggml_backend_device      device;
    struct ggml_backend_reg         reg;
    struct ggml_backend_buffer_type buft;
    char                            buft_name[32];
    struct ggml_backend_buffer_type inner_buft;  // the inner device's, as ours, if is_second
    char                            inner_name[64];
    ggml_backend_buffer_type_t      offered[2];  // buft, for the loader of a model on several devices
    ggml_backend_dev_t              inner;
    bool                            inner_is_cpu;
    bool                            is_second;  // another pager of the model has the same inner device
    struct tsg_group *              group;      // the pagers of a model on several devices; NULL: it has one
    enum tsg_policy                 policy;
    atomic_int                      refs;  // the caller's, one per buffer, one per backend
    mtx_t                           turn;  // held by whoever is next at the lock
    mtx_t                           lock;  // held while a graph is computed and while slots change by hand; see tsg_pager_lock()
    struct tsg_engine *             engines; // all, linked
    struct tsg_engine *             active;  // whose kernels may still read slots
    uint64_t                        n_resized;
    bool                            broken;  // a resize could neither be done nor undone: there are no slots
    bool                            committed;
    bool                            ready;     // the host pool is complete
    enum tsg_engine_kind            engine;    // what the caller asked for
    struct tsg_host                 host;
    struct tsg_cuda *               cuda;      // the driver, NULL until somebody needs it: see tsg_pager_cuda()
    struct tsg_resident *           resident;  // slot maps and kernels on a CUDA device, NULL: host-driven
    struct tsg_coexec               coexec;    // misses on the CPU
    struct tsg_notes                notes;
    struct tsg_profile              profile;
    char                            why[256];  // why the engine is what it is

    struct tsg_layer ** layers;  // [n_layers]
    int32_t             n_layers;
    struct tsg_pool *   pools;   // [n_pools]
    int32_t             n_pools;

    ggml_backend_buffer_t tables;  // biases and scales on the host
    struct tsg_counts     counts[2];
};

// A thread that decodes has the lock nearly all the time and wants it back at once: without turns the others might never get it.
static inline void tsg_pager_lock(struct tsg_pager * pager) {
    mtx_lock(&pager->turn);
    mtx_lock(&pager->lock);
    mtx_unlock(&pager->turn);
}

static inline void tsg_pager_unlock(struct tsg_pager * pager) {
    mtx_unlock(&pager->lock);
}

static inline size_t tsg_weight_bytes(const struct tsg_weight * w) {
    return w->bytes * (size_t) w->layer->n_expert;
}

// errors
enum tsg_status tsg_fail(enum tsg_status status, const char * format, ...) __attribute__((format(printf, 2, 3)));

// life
void tsg_pager_ref(struct tsg_pager * pager);
void tsg_pager_unref(struct tsg_pager * pager);
void tsg_pager_view_resident(struct tsg_pager * pager);            // for the layers of pools that hold everything: their part of it
enum tsg_status tsg_pager_choose_engine(struct tsg_pager * pager);  // and why; TSG_E_STATE if the one asked for cannot be

// group.c
void     tsg_group_leave(struct tsg_pager * pager);
uint64_t tsg_lockable(struct tsg_pager * pager);                // bytes of memory that may be locked; there are host.ops
void     tsg_locked(struct tsg_pager * pager, uint64_t bytes);  // they are
void     tsg_unlocked(struct tsg_pager * pager);                // all that it had
bool     tsg_group_wants(const struct tsg_pager * pager, const struct ggml_tensor * op);  // false: this weight belongs into another buffer of this device
bool     tsg_group_reads(const struct tsg_pager * pager, ggml_backend_buffer_type_t buft);

// buffer.c
void                  tsg_buffer_type_init(struct tsg_pager * pager);
ggml_backend_buffer_t tsg_host_alloc(struct tsg_pager * pager, size_t size, bool * pinned);  // page-locked if the device grants it
struct tsg_weight *   tsg_weight_of(struct tsg_pager * pager, const struct ggml_tensor * tensor);  // NULL: not an expert weight of this pager

// pin.c
struct tsg_cuda * tsg_pager_cuda(struct tsg_pager * pager);  // the driver for the inner device; NULL, and why in tsg_last_error(), if it is no CUDA device

// device.c, backend.c
void           tsg_device_init(struct tsg_pager * pager);
ggml_backend_t tsg_backend_new(struct tsg_pager * pager, const char * params);

// pool.c
enum tsg_status tsg_pool_alloc(struct tsg_pager * pager, struct tsg_pool * pool);  // device memory for n_slots; stages that there are stay
void            tsg_pool_release_slots(struct tsg_pool * pool);  // device memory goes, the bookkeeping stays
void            tsg_pool_release_stages(struct tsg_pool * pool);
void            tsg_pool_free(struct tsg_pool * pool);
size_t          tsg_layer_expert_bytes(const struct tsg_layer * layer);  // payload of one expert
void            tsg_pool_view(struct ggml_tensor * view, const struct ggml_tensor * tensor, int64_t first, int64_t n);  // experts [first, first + n)
// Copies on a backend's stream; with backend NULL they are complete on return.
void tsg_pool_load_slot(struct tsg_pool * pool, ggml_backend_t backend, const struct tsg_layer * layer, int32_t expert, int32_t slot);
void tsg_pool_load_stage(struct tsg_pool * pool, ggml_backend_t backend, const struct tsg_layer * layer, int32_t expert, int32_t stage);
void tsg_pool_slot_to_stage(struct tsg_pool * pool, ggml_backend_t backend, int32_t slot, int32_t expert);  // stage 0

// resident.c
bool tsg_resident_init(struct tsg_pager * pager);  // false, and why in tsg_last_error(): stay host-driven
void tsg_resident_free(struct tsg_pager * pager);
bool tsg_resident_renew(struct tsg_pager * pager);  // for pools of another size; the maps are on the host. False: nothing changed, see tsg_last_error()
void tsg_resident_look(struct tsg_pager * pager);     // the host can read the slot maps, which stay where they are; the pager is locked
void tsg_resident_to_host(struct tsg_pager * pager);  // brings the slot maps home; likewise
void tsg_resident_add_counts(const struct tsg_pager * pager, struct tsg_counts * counts);
void tsg_resident_reset_counts(struct tsg_pager * pager);
void tsg_resident_throttle(struct tsg_pager * pager, double bytes_per_second);

// profile.c
void tsg_profile_free(struct tsg_pager * pager);

// coexec.c, admit.c
bool tsg_coexec_lost(const struct tsg_pager * pager);   // the CPU still computes what nobody waits for: what it reads must stay
void tsg_coexec_describe(struct tsg_pager * pager);     // writes coexec.text
void tsg_coexec_free(struct tsg_pager * pager);
void tsg_admit_settle(struct tsg_pager * pager);        // waits for copies on their way into slots; the pager is locked

// layers.c: the pager is locked
bool tsg_layers_place(struct tsg_pager * pager);                  // false, and why in tsg_last_error(): no memory, nothing changed
void tsg_layers_release(struct tsg_pager * pager, bool restore);  // the slots page again; with what lay there before, if no kernel runs
bool tsg_layers_are_placed(const struct tsg_pager * pager);       // graphs name slots that may mean other layers tomorrow: no uid for ggml-cuda
void tsg_layers_count(const struct tsg_pager * pager, int32_t * on_device, int32_t * all);  // layers of pools that do not hold everything
static inline bool tsg_layer_is_resident(const struct tsg_pager * pager, const struct tsg_layer * layer) {
    return pager->pools[layer->pool].resident || layer->whole;
}

static inline bool tsg_all_resident(const struct tsg_pager * pager) {
    bool all = true;
    for (int32_t i = 0; i < pager->n_pools; i++) {
        all &= pager->pools[i].resident;
    }
    return all;
}

// The layer of an expert, by its number in the pool.
static inline struct tsg_layer * tsg_layer_of(const struct tsg_pager * pager, int32_t pool, int32_t expert) {
    for (int32_t i = 0; i < pager->n_layers; i++) {
        struct tsg_layer * layer = pager->layers[i];
        if (layer->pool == pool && expert >= layer->first && expert < layer->first + layer->n_expert) {
            return layer;
        }
    }
    return NULL;
}

// engine.c
struct tsg_engine * tsg_engine_new(struct tsg_pager * pager, ggml_backend_t inner);
void                tsg_engine_free(struct tsg_engine * engine);
enum ggml_status    tsg_engine_compute(struct tsg_engine * engine, struct ggml_cgraph * graph);
void                tsg_engine_wait(struct tsg_pager * pager);  // until no kernel reads slots; the pager is locked
