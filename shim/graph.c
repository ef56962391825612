#include "graph.h"

#include <stdlib.h>
#include <string.h>

// ---- what a node reads ----

struct tsg_weight * tsg_step_matmul(const struct tsg_step * step, const struct ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT_ID || node->src[2] != step->ids) {
        return NULL;
    }
    struct tsg_weight * w = node->src[0]->extra;
    for (int32_t p = 0; p < step->layer->n_parts; p++) {
        if (w == &step->layer->weight[p]) {
            return w;
        }
    }
    return NULL;  // an adapter's matmul: keeps its own weights and the router's ids
}

// ADD_ID(x, bias, ids) with the layer's own bias table.
struct tsg_weight * tsg_step_bias(const struct tsg_step * step, const struct ggml_tensor * node) {
    if (node->op != GGML_OP_ADD_ID || node->src[2] != step->ids) {
        return NULL;
    }
    for (int32_t p = 0; p < step->layer->n_parts; p++) {
        if (step->layer->weight[p].bias && strcmp(step->layer->weight[p].bias_name, node->src[1]->name) == 0) {
            return &step->layer->weight[p];
        }
    }
    return NULL;
}

// GET_ROWS(REPEAT(RESHAPE(scale)), ids): how llama.cpp looks up a per-expert scale.
struct tsg_weight * tsg_step_scale(const struct tsg_step * step, const struct ggml_tensor * node) {
    if (node->op != GGML_OP_GET_ROWS || node->src[1] != step->ids || node->src[0]->op != GGML_OP_REPEAT ||
        node->src[0]->src[0]->op != GGML_OP_RESHAPE) {
        return NULL;
    }
    const struct ggml_tensor * table = node->src[0]->src[0]->src[0];
    for (int32_t p = 0; p < step->layer->n_parts; p++) {
        if (step->layer->weight[p].scale && strcmp(step->layer->weight[p].scale_name, table->name) == 0) {
            return &step->layer->weight[p];
        }
    }
    return NULL;
}

static const struct tsg_weight * read_by(const struct tsg_step * step, const struct ggml_tensor * node) {
    const struct tsg_weight * w = tsg_step_matmul(step, node);
    w = w ? w : tsg_step_bias(step, node);
    return w ? w : tsg_step_scale(step, node);
}

// A cut between a matmul and its scale or bias would cost their fusion.
static int end_of_matmuls(const struct ggml_cgraph * graph, const struct tsg_step * step) {
    int end = step->first + 1;
    for (int i = step->first; i < step->end; i++) {
        const struct ggml_tensor * node = graph->nodes[i];
        if ((node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_ADD_ID) && node->src[2] == step->ids) {
            end = i + 1;
        } else if (node->op == GGML_OP_GET_ROWS && node->src[1] == step->ids) {
            end = i + 2 < step->end ? i + 2 : step->end;  // with the multiplication by the scale
        }
    }
    return end;
}

static int start_of_last_part(const struct ggml_cgraph * graph, const struct tsg_step * step) {
    int first = graph->n_nodes;
    for (int i = step->first; i < step->end; i++) {
        const struct ggml_tensor * node = graph->nodes[i];
        const struct tsg_weight *  w    = read_by(step, node);
        if (w && w->part == step->layer->n_parts - 1) {
            first = i < first ? i : first;
        } else if (w && i > first) {
            return step->first;
        }
        for (int j = step->first; w && node->op == GGML_OP_GET_ROWS && j < first; j++) {
            if (graph->nodes[j] == node->src[0] && first < graph->n_nodes) {
                return step->first;  // the table of scales is repeated before the matmul
            }
        }
    }
    return first < graph->n_nodes ? first : step->first;
}

// ---- finding ----

static bool add_step(struct tsg_graph * g, struct tsg_step step) {
    if (g->n_steps == g->cap_steps) {
        const int         cap   = g->cap_steps ? 2 * g->cap_steps : 64;
        struct tsg_step * steps = realloc(g->steps, sizeof(struct tsg_step) * (size_t) cap);
        if (!steps) {
            return false;
        }
        g->steps     = steps;
        g->cap_steps = cap;
    }
    g->steps[g->n_steps++] = step;
    return true;
}

bool tsg_graph_scan(struct tsg_graph * g, struct tsg_pager * pager, struct ggml_cgraph * graph) {
    g->n_steps = 0;
    for (int i = 0; i < graph->n_nodes; i++) {
        struct ggml_tensor * node = graph->nodes[i];
        if (node->op != GGML_OP_MUL_MAT_ID || !node->src[0]->buffer || node->src[0]->buffer->buft != &pager->buft) {
            continue;
        }
        struct tsg_weight * w = node->src[0]->extra;
        if (!w || node->src[2]->type != GGML_TYPE_I32) {
            tsg_fail(TSG_E_STATE, "%s is used through a view, which cannot be paged", node->src[0]->name);
            return false;
        }
        if (node->src[2]->ne[0] > w->layer->n_used) {  // the engine's slot ids have room for n_used
            tsg_fail(TSG_E_STATE, "%s: the graph wants %lld experts a token, planned were %d", w->name, (long long) node->src[2]->ne[0],
                     w->layer->n_used);
            return false;
        }
        struct tsg_step * last = g->n_steps ? &g->steps[g->n_steps - 1] : NULL;
        if (last && last->ids == node->src[2] && last->layer == w->layer) {
            continue;
        }
        if (last) {
            last->end = i;
        }
        if (!add_step(g, (struct tsg_step) { .layer = w->layer, .ids = node->src[2], .first = i, .end = graph->n_nodes })) {
            tsg_fail(TSG_E_MEMORY, "no memory for the steps of a graph");
            return false;
        }
    }
    for (int i = 0; i < g->n_steps; i++) {
        g->steps[i].done = end_of_matmuls(graph, &g->steps[i]);
        g->steps[i].down = start_of_last_part(graph, &g->steps[i]);
    }
    return true;
}

// ---- patching ----

static bool save(struct tsg_graph * g, struct ggml_tensor * node) {
    if (g->n_patches == g->cap_patches) {
        const int          cap     = g->cap_patches ? 2 * g->cap_patches : 256;
        struct tsg_patch * patches = realloc(g->patches, sizeof(struct tsg_patch) * (size_t) cap);
        if (!patches) {
            tsg_fail(TSG_E_MEMORY, "no memory for the patches of a graph");
            return false;
        }
        g->patches     = patches;
        g->cap_patches = cap;
    }
    g->patches[g->n_patches++] = (struct tsg_patch) { .node = node, .saved = *node };
    return true;
}

void tsg_graph_restore(struct tsg_graph * g) {
    while (g->n_patches > 0) {  // backwards: a node patched twice ends as it was first
        const struct tsg_patch * patch = &g->patches[--g->n_patches];
        *patch->node                   = patch->saved;
    }
}

void tsg_graph_free(struct tsg_graph * g) {
    free(g->steps);
    free(g->patches);
}

bool tsg_graph_use_experts(struct tsg_graph * g, struct ggml_cgraph * graph, const struct tsg_step * step, struct ggml_tensor * const * weights) {
    for (int i = step->first; i < step->end; i++) {
        struct ggml_tensor * node = graph->nodes[i];
        struct tsg_weight *  w    = tsg_step_matmul(step, node);
        if (w) {
            if (!save(g, node)) {
                return false;
            }
            node->src[0] = weights[w->part];
        }
    }
    return true;
}

// The lookup keeps its three nodes, each now over slots instead of experts, so that it is right whether the backend fuses it or runs it.
static bool patch_scale(struct tsg_graph * g, struct ggml_tensor * get_rows, struct ggml_tensor * table, struct ggml_tensor * scratch,
                        struct ggml_tensor * slot_ids) {
    struct ggml_tensor * repeat  = get_rows->src[0];
    struct ggml_tensor * reshape = repeat->src[0];
    if (!save(g, get_rows) || !save(g, repeat) || !save(g, reshape)) {
        return false;
    }
    const int64_t n_slots = table->ne[0];
    reshape->src[0]   = table;
    reshape->view_src = table;
    reshape->buffer   = table->buffer;
    reshape->data     = table->data;
    reshape->ne[1]    = n_slots;
    reshape->nb[2] = reshape->nb[3] = (size_t) n_slots * sizeof(float);
    repeat->buffer = scratch->buffer;
    repeat->data   = scratch->data;
    repeat->ne[1]  = n_slots;
    repeat->nb[2]  = (size_t) n_slots * sizeof(float);
    repeat->nb[3]  = repeat->nb[2] * (size_t) repeat->ne[2];
    get_rows->src[1] = slot_ids;
    return true;
}

bool tsg_graph_use_slots(struct tsg_graph * g, struct ggml_cgraph * graph, const struct tsg_step * step, const struct tsg_pool * pool,
                         struct ggml_tensor * slot_ids, struct ggml_tensor * const * repeats) {
    for (int i = step->first; i < step->end; i++) {
        struct ggml_tensor * node = graph->nodes[i];
        struct tsg_weight *  w;
        if ((w = tsg_step_matmul(step, node))) {
            if (!save(g, node)) {
                return false;
            }
            node->src[0] = pool->slot[w->part];
            node->src[2] = slot_ids;
        } else if ((w = tsg_step_bias(step, node))) {
            if (!save(g, node)) {
                return false;
            }
            node->src[1] = pool->bias[w->part];
            node->src[2] = slot_ids;
        } else if ((w = tsg_step_scale(step, node))) {
            if (!patch_scale(g, node, pool->scale[w->part], repeats[w->part], slot_ids)) {
                return false;
            }
        }
    }
    return true;
}
