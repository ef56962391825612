// rig.h - a small mixture of experts, twice: on the plain CPU backend, and on a pager's proxy device over the CPU device.
#pragma once

#include "check.h"
#include "pager.h"

#include "ggml-alloc.h"
#include "ggml-cpu.h"

enum {
    RIG_LAYERS  = 4,
    RIG_PARTS   = 3,   // gate, up, down; or gate_up and down
    N_EMBD      = 64,
    N_FF        = 32,
    MAX_TOKENS  = 128,
    MAX_EXPERTS = 64,
};

struct spec {
    enum ggml_type  type;
    bool            tables;  // per-expert biases and scales
    bool            fused;   // gate and up in one weight
    bool            pools;   // odd layers go to a second pool
    bool            adapter; // a LoRA on the first part of every layer
    bool            loose;   // the activation in single nodes: clamps, one of them in place, a scale, views
    int32_t         n_layers;
    int32_t         n_expert[RIG_LAYERS];
    int32_t         n_used;
    int64_t         n_slots;  // of each pool
    enum tsg_policy policy;
};

// The tensors of the model on one of the two sides, [layer][part].
struct side {
    ggml_backend_t        backend;
    struct ggml_context * ctx_experts;
    struct ggml_context * ctx_rest;
    struct ggml_context * ctx_adapter;
    ggml_backend_buffer_t experts;
    ggml_backend_buffer_t rest;
    ggml_backend_buffer_t adapter;  // of the experts' buffer type, as llama.cpp does it
    struct ggml_tensor *  weight[RIG_LAYERS][RIG_PARTS];  // [ne0, ne1, n_expert]
    struct ggml_tensor *  bias[RIG_LAYERS][RIG_PARTS];    // [ne1, n_expert] or NULL
    struct ggml_tensor *  scale[RIG_LAYERS][RIG_PARTS];   // [n_expert] or NULL
    struct ggml_tensor *  lora_a[RIG_LAYERS];             // [N_EMBD, 4, n_expert] or NULL
    struct ggml_tensor *  lora_b[RIG_LAYERS];             // [4, ne1, n_expert] or NULL
};

struct rig {
    struct spec        spec;
    ggml_backend_dev_t cpu;
    struct tsg_pager * pager;
    struct side        plain;
    struct side        paged;
    int32_t            layer[RIG_LAYERS];  // what tsg_pager_add_layer gave
    int                file[2];            // the shards: layers take turns
};

// What goes into a graph: inputs, and where the ids come from.
struct batch {
    int32_t n_tokens;
    int32_t n_out;           // the last layer sees so many tokens: those whose logits are wanted
    int32_t n_used;          // experts a token
    bool    argsort;         // ids = top-k of the probabilities, computed in the graph
    bool    packed;          // ids in rows of n_used instead of rows of n_expert
    bool    view_of_weight;  // use expert weights through a view, which cannot be paged
    float   x[MAX_TOKENS * N_EMBD];
    float   probs[RIG_LAYERS][MAX_TOKENS * MAX_EXPERTS];  // [n_tokens][n_expert]
    int32_t order[RIG_LAYERS][MAX_TOKENS * MAX_EXPERTS];  // [n_tokens][n_expert], the first n_used of a row are the ids
};

struct graph {
    struct ggml_context * ctx;
    struct ggml_cgraph *  graph;
    ggml_gallocr_t        alloc;
    struct ggml_tensor *  x;
    struct ggml_tensor *  out_ids;
    struct ggml_tensor *  probs[RIG_LAYERS];
    struct ggml_tensor *  order[RIG_LAYERS];
    struct ggml_tensor *  out[RIG_LAYERS];  // [N_EMBD, n_tokens] after each layer
    int32_t               n_layers;
};

extern const char * const rig_part_names[2][RIG_PARTS];  // [fused]

int32_t rig_n_parts(const struct spec * spec);
int64_t rig_ne0(const struct spec * spec, int32_t part);
int64_t rig_ne1(const struct spec * spec, int32_t part);

struct tsg_pager *   rig_pager(enum tsg_policy policy);  // over the CPU device
// tsg_pager_ready() without progress.
enum tsg_status      rig_ready(struct tsg_pager * pager);
enum tsg_status      rig_pool(struct tsg_pager * pager, int64_t n_slots, int32_t * pool);
struct ggml_tensor * rig_stage(const struct tsg_pool * pool, int32_t part);

// A pager with its files and layers, not committed.
struct rig rig_new(const struct spec * spec);
// Commits, loads both sides, makes the proxy backend.
void       rig_offer(struct rig * rig);
// The same, and checks that the pager is ready.
void       rig_load(struct rig * rig);
struct rig rig_open(const struct spec * spec);
void       rig_close(struct rig * rig);
void       side_free(struct side * side);

ggml_backend_t rig_backend(struct rig * rig);  // one more proxy backend, of one thread

struct batch * batch_random(const struct spec * spec, int32_t n_tokens, uint64_t seed);  // free() it
struct graph   graph_build(const struct rig * rig, const struct side * side, const struct batch * batch);
void           graph_set_inputs(struct graph * graph, const struct batch * batch);
void           graph_free(struct graph * graph);
// The outputs of all layers have the same bits.
bool graph_same_output(const struct graph * a, const struct graph * b);

// Computes `batch` on both sides, compares bit for bit, and checks that the paged graph was left as it was and that the pager is sound.
void rig_compare(struct rig * rig, const struct batch * batch);
// The same for a random batch, with `backend` as the proxy backend.
void rig_compare_random(struct rig * rig, ggml_backend_t backend, int32_t n_tokens, uint64_t seed);
// Every expert in a slot has the bytes of the host pool there.
void rig_check_slots(struct rig * rig);

struct tsg_stats rig_stats(struct rig * rig);
// The status is the wanted one and tsg_last_error() contains `message`.
bool rig_failed(enum tsg_status got, enum tsg_status want, const char * message);
