// chain.h - the expert chain of a step: what is computed of its experts before the router's weights are applied, and the same for the CPU.
//
// The chain begins with the step's first expert matmul and ends with the last one, its scale and its bias. Every node in it works row by row: what it
// gives for one token and one expert depends on nothing else. So any set of (token, expert) pairs can be computed elsewhere, as rows of one matrix.
#pragma once

#include "graph.h"

#define TSG_CHAIN_NODES  48
#define TSG_CHAIN_INPUTS 4

// A token and an expert that it wants.
struct tsg_pair {
    int32_t token;
    int32_t used;    // which of the token's experts: the row of the chain's tensors
    int32_t expert;  // of the layer
};

struct tsg_chain {
    const struct tsg_step * step;
    int                  end;     // index behind the last node
    int                  n_nodes;
    struct ggml_tensor * node[TSG_CHAIN_NODES];    // in the order of the graph; the last one is its output, F32 [ne0, n_used, n_tokens]
    int                  n_inputs;
    struct ggml_tensor * input[TSG_CHAIN_INPUTS];  // what they read that no expert made, F32 [ne0, 1 or n_used, 1 or n_tokens]
};

// False, and why in tsg_last_error(), if some node of it cannot be computed row by row.
bool tsg_chain_find(struct tsg_chain * chain, struct ggml_cgraph * graph, const struct tsg_step * step);

static inline struct ggml_tensor * tsg_chain_out(const struct tsg_chain * chain) {
    return chain->node[chain->n_nodes - 1];
}

// ---- the same on the CPU ----

// Bytes of memory that a clone for `n` pairs takes, and where in it the chain's inputs are to be put, each as its raw bytes on the device.
struct tsg_clone_size {
    size_t input[TSG_CHAIN_INPUTS];  // offsets
    size_t rows;                     // offset of what the clone computes in
    size_t total;
};

struct tsg_clone_size tsg_clone_measure(const struct tsg_chain * chain, int64_t n);

// The chain for these pairs alone, every tensor with a row per pair, over the experts where they lie in the host pool. `ctx` is reset; `memory` holds
// the inputs. `out` becomes its output, [ne0, n]. Valid until the next one.
struct ggml_cgraph * tsg_chain_clone(const struct tsg_chain * chain, struct ggml_context * ctx, uint8_t * memory, const struct tsg_pair * pairs, int64_t n,
                                     struct ggml_tensor ** out);
struct ggml_context * tsg_clone_context(void);  // large enough for any of them
