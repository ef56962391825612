// coexec.h - misses computed where they lie: by ggml's CPU backend from the host pool, while the inner device computes what is in slots.
#pragma once

#include "chain.h"

#define TSG_MAX_PAIRS    2048   // rows of a step: 8 tokens of 256 experts each

// What an engine needs for it.
struct tsg_corun {
    struct tsg_chain      chain;
    struct ggml_context * ctx;
    ggml_backend_buffer_t buffer;  // page-locked: inputs as they came from the device, and what the clone computes
    uint8_t *             memory;
    size_t                size;
    struct tsg_pair       pairs[TSG_MAX_PAIRS];  // what the CPU computes of this step
    int32_t               n_pairs;
    bool                  missing[TSG_MAX_EXPERTS];  // [n_distinct] of the step
    bool                  candidate[TSG_MAX_EXPERTS];  // likewise: may still enter the pool
    bool                  on_cpu[TSG_MAX_EXPERTS];   // by expert
};

struct tsg_engine;

bool tsg_coexec_on(const struct tsg_pager * pager);  // decode goes through the host-driven engine, misses to the CPU
bool tsg_coexec_can(const struct tsg_engine * e, const struct tsg_step * step);
// Computes a step of a decode graph, and the graph up to *done. False, and why in tsg_last_error(), if something failed.
bool tsg_coexec_step(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, int * done);
void tsg_corun_free(struct tsg_engine * e);

// admit.c: which misses enter the pool, and how they get there. `missing` is [e->n_distinct]: those of the step's experts that no slot holds.
int32_t tsg_admit_fetch(struct tsg_engine * e, const struct tsg_step * step, bool * missing);  // now, for use in this step; returns how many. -1: failed
bool    tsg_admit_later(struct tsg_engine * e, const struct tsg_step * step, const bool * missing);  // in the background
void    tsg_admit_poll(struct tsg_pager * pager);    // those that have arrived are there
