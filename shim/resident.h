// resident.h - what the CUDA kernels and the C side share: the bookkeeping of a pool in device memory.
//
// The structures mirror slots.h, and resident.cu does what slots.c does, step by step and with the same score functions, so that the same trace gives the
// same hits. `scripts/gpu-check --parity` compares the two.
#pragma once

#include "policy.h"

#define TSG_STEP_THREADS   256  // threads of a block; also the most ids (n_used x n_tokens) of one step
#define TSG_COMMIT_THREADS 1024
#define TSG_VICTIMS        16  // one token of top-8: eight misses, and eight more that it may want itself
#define TSG_MAX_BANKS      (3 * TSG_MAX_PARTS)

// One piece of an expert's payload: a weight, a bias row or a scale. Addresses are device addresses.
struct tsg_bank {
    const char * host;   // [n_expert][bytes], page-locked host memory
    char *       slots;  // [n_slots][bytes]
    uint64_t     bytes;
};

struct tsg_dev_layer {
    int32_t         first;  // id in the pool of expert 0
    int32_t         n_expert;
    int32_t         n_banks;
    int32_t         n_early;  // of these, read by the layer's first matmul; the others only by its last
    struct tsg_bank bank[TSG_MAX_BANKS];
};

// Counters of decode; a copy of it in mapped host memory is what the host reads without waiting for the device.
struct tsg_dev_counts {
    uint64_t lookups;
    uint64_t hits;
    uint64_t misses;
    uint64_t evictions;
    uint64_t bytes_link;
};

// A missing expert of a layer and its new slot.
struct tsg_dev_load {
    int32_t expert;
    int32_t slot;
};

// What changes while graphs run.
struct tsg_dev_state {
    uint64_t              clock;
    int32_t               policy;
    int32_t               n_used;
    int32_t               n_protected;
    int32_t               n_victims;              // -1: not known
    int32_t               victims[TSG_VICTIMS];   // slots that the next step would evict, in order
    struct tsg_dev_counts counts;

    int32_t n_sent;  // blocks of tsg_step that have asked for all they copy

    // what tsg_step decided, for tsg_commit
    int32_t n_distinct;
    int32_t expert[TSG_STEP_THREADS];  // of the layer, ascending
    int32_t slot[TSG_STEP_THREADS];
};

// Where the time of a layer goes. Nanoseconds of the device's clock.
struct tsg_dev_time {
    uint64_t              start;    // this graph's: the router has chosen,
    uint64_t              decided;  // the slots are known,
    uint64_t              copied;   // the last byte is there, 0 = nothing was copied,
    uint64_t              ended;    // the layer's last matmul is done
    struct tsg_layer_time sum;
};

enum tsg_stamp {
    TSG_STAMP_BEGIN,   // of a graph
    TSG_STAMP_LAYER,   // the end of a layer
    TSG_STAMP_OUTPUT,  // the end of a graph
};

// Addresses and sizes, fixed for the life of the pool: kernels get it by value, so that they find everything without a load.
struct tsg_dev_pool {
    struct tsg_dev_state *  state;
    int32_t *               slot_of;
    int32_t *               expert_in;
    uint8_t *               pinned;
    struct tsg_use *        use;
    uint64_t *              hits;
    uint64_t *              misses;
    struct tsg_dev_counts * page;  // in mapped host memory
    uint64_t                period;
    int32_t                 n_slots;
    int32_t                 pad;
};

// Where resident experts of a layer are to be copied: the prefill stage.
struct tsg_dev_stage {
    int32_t      n_banks;
    int32_t      pad;
    const char * slots[TSG_MAX_PARTS];
    char *       stage[TSG_MAX_PARTS];
    uint64_t     bytes[TSG_MAX_PARTS];
};
