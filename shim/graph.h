// graph.h - the expert layers of a graph, and patches of its nodes.
#pragma once

#include "pager.h"

// The nodes of one expert layer: all MUL_MAT_ID over one ids tensor, with whatever stands between them.
struct tsg_step {
    struct tsg_layer *   layer;
    struct ggml_tensor * ids;    // router's choice, I32 [n_used, n_tokens], rows may be strided
    int                  first;  // first MUL_MAT_ID
    int                  down;   // where the layer's last part comes into play: the first node that reads its weight, bias or scale; first = not to be told
    int                  done;   // behind the last node that reads the layer's weights, and behind what ggml-cuda may fuse with it
    int                  end;    // first node of the next step
};

// A node as it was. Patches are undone after the graph has been handed to the device: llama.cpp keeps and reuses its graphs.
struct tsg_patch {
    struct ggml_tensor * node;
    struct ggml_tensor   saved;
};

struct tsg_graph {
    struct tsg_step *  steps;
    int                n_steps;
    int                cap_steps;
    struct tsg_patch * patches;
    int                n_patches;
    int                cap_patches;
};

// Which weight of the step a node uses: as a matmul over its experts, as their biases, or as a lookup of their scales. NULL: none.
struct tsg_weight * tsg_step_matmul(const struct tsg_step * step, const struct ggml_tensor * node);
struct tsg_weight * tsg_step_bias(const struct tsg_step * step, const struct ggml_tensor * node);
struct tsg_weight * tsg_step_scale(const struct tsg_step * step, const struct ggml_tensor * node);

// Finds the steps. Returns false if expert weights are used in a way that cannot be paged (tsg_last_error() says which).
bool tsg_graph_scan(struct tsg_graph * g, struct tsg_pager * pager, struct ggml_cgraph * graph);

// Points the expert matmuls of a step at `weights` ([TSG_MAX_PARTS] tensors) and keeps the router's ids.
bool tsg_graph_use_experts(struct tsg_graph * g, struct ggml_cgraph * graph, const struct tsg_step * step, struct ggml_tensor * const * weights);

// Points the expert matmuls of a step, its per-expert biases and its per-expert scales at the slots, and their ids at `slot_ids`. All of them: ggml-cuda
// fuses matmul, scale, bias and activation only if they share one ids tensor. `repeats`, [TSG_MAX_PARTS], are F32 scratch of n_slots x tokens.
bool tsg_graph_use_slots(struct tsg_graph * g, struct ggml_cgraph * graph, const struct tsg_step * step, const struct tsg_pool * pool,
                         struct ggml_tensor * slot_ids, struct ggml_tensor * const * repeats);

void tsg_graph_restore(struct tsg_graph * g);
void tsg_graph_free(struct tsg_graph * g);
