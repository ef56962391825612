#include "chain.h"

#include <string.h>

#define ALIGN       64
#define CLONE_NODES (2 * TSG_CHAIN_NODES)  // with views and what hangs on them

// ---- finding ----

static int find(struct ggml_tensor * const * list, int n, const struct ggml_tensor * tensor) {
    for (int i = 0; i < n; i++) {
        if (list[i] == tensor) {
            return i;
        }
    }
    return -1;
}

static bool in_chain(const struct tsg_chain * c, const struct ggml_tensor * tensor) {
    return find(c->node, c->n_nodes, tensor) >= 0;
}

static bool reads_chain(const struct tsg_chain * c, const struct ggml_tensor * node) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (node->src[i] && in_chain(c, node->src[i])) {
            return true;
        }
    }
    return false;
}

// Rows of the chain: a float for every feature, one row for every expert of every token.
static bool has_rows(const struct tsg_step * step, const struct ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->ne[1] == step->ids->ne[0] && t->ne[2] == step->ids->ne[1] && t->ne[3] == 1;
}

static bool can_be_input(const struct tsg_step * step, const struct ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && (t->ne[1] == 1 || t->ne[1] == step->ids->ne[0]) &&
           (t->ne[2] == 1 || t->ne[2] == step->ids->ne[1]) && t->ne[3] == 1;
}

// Operations that compute a row from the same row of their sources.
static bool is_rowwise(const struct ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
        case GGML_OP_SQR:
        case GGML_OP_SQRT:
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
        case GGML_OP_UNARY:
        case GGML_OP_GLU:
        case GGML_OP_NORM:
        case GGML_OP_RMS_NORM:
        case GGML_OP_CONT:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
            return true;
        default:
            return false;
    }
}

// A part of every row, or the node's own source computed in place.
static bool keeps_rows(const struct tsg_chain * c, const struct ggml_tensor * node) {
    const struct ggml_tensor * src  = node->src[0];
    const struct ggml_tensor * root = src->view_src ? src->view_src : src;
    if (!node->view_src) {
        return node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE;
    }
    const size_t begin = src->view_src ? src->view_offs : 0;
    return in_chain(c, src) && node->view_src == root && node->nb[1] == src->nb[1] && node->nb[2] == src->nb[2] && node->view_offs >= begin &&
           node->view_offs - begin + (size_t) node->ne[0] * sizeof(float) <= (size_t) src->ne[0] * sizeof(float);
}

// A source that no expert made: it must be there when the router's ids are.
static bool add_input(struct tsg_chain * c, const struct ggml_cgraph * graph, const struct tsg_step * step, struct ggml_tensor * src) {
    if (find(c->input, c->n_inputs, src) >= 0) {
        return true;
    }
    if (!can_be_input(step, src) || c->n_inputs == TSG_CHAIN_INPUTS) {
        return false;
    }
    for (int i = step->first; i < c->end; i++) {
        if (graph->nodes[i] == src) {
            return false;
        }
    }
    c->input[c->n_inputs++] = src;
    return true;
}

static bool add_node(struct tsg_chain * c, const struct ggml_cgraph * graph, const struct tsg_step * step, struct ggml_tensor * node) {
    if (!has_rows(step, node) || c->n_nodes == TSG_CHAIN_NODES) {
        return false;
    }
    const bool matmul = tsg_step_matmul(step, node), bias = tsg_step_bias(step, node);
    bool       ok = matmul || bias || (is_rowwise(node) && keeps_rows(c, node));
    for (int i = 0; i < GGML_MAX_SRC && ok; i++) {
        struct ggml_tensor * src   = node->src[i];
        const bool           known = !src || (matmul && i != 1) || (bias && i != 0) || in_chain(c, src) || tsg_step_scale(step, src);
        ok = known || add_input(c, graph, step, src);
    }
    if (ok) {
        c->node[c->n_nodes++] = node;
    }
    return ok;
}

// The nodes behind the last expert matmul that still belong to it: its scale and its bias.
static int end_of_chain(const struct ggml_cgraph * graph, const struct tsg_step * step) {
    int last = step->first;
    for (int i = step->first; i < step->end; i++) {
        struct ggml_tensor * node = graph->nodes[i];
        const bool scaled = node->op == GGML_OP_MUL && node->src[0] == graph->nodes[last] && tsg_step_scale(step, node->src[1]);
        const bool biased = tsg_step_bias(step, node) && node->src[0] == graph->nodes[last];
        if (tsg_step_matmul(step, node) || scaled || biased) {
            last = i;
        }
    }
    return last + 1;
}

bool tsg_chain_find(struct tsg_chain * c, struct ggml_cgraph * graph, const struct tsg_step * step) {
    *c = (struct tsg_chain) { .step = step, .end = end_of_chain(graph, step) };
    const struct ggml_tensor * wrong = NULL;
    for (int i = step->first; i < c->end && !wrong; i++) {
        struct ggml_tensor * node = graph->nodes[i];
        if ((tsg_step_matmul(step, node) || reads_chain(c, node)) && !add_node(c, graph, step, node)) {
            wrong = node;
        }
    }
    for (int i = c->end; i < step->end && !wrong; i++) {  // nobody may look at what is inside
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            struct ggml_tensor * src = graph->nodes[i]->src[j];
            wrong = src && src != tsg_chain_out(c) && in_chain(c, src) ? graph->nodes[i] : wrong;
        }
    }
    if (!wrong && c->node[c->n_nodes - 1] != graph->nodes[c->end - 1]) {
        wrong = graph->nodes[c->end - 1];
    }
    if (wrong) {
        tsg_fail(TSG_E_STATE, "%s (%s) between the experts of %s cannot be computed row by row", wrong->name, ggml_op_desc(wrong),
                 step->layer->weight[0].name);
    }
    return !wrong;
}

// ---- cloning ----

static size_t padded(size_t size) {
    return GGML_PAD(size, ALIGN);
}

struct tsg_clone_size tsg_clone_measure(const struct tsg_chain * c, int64_t n) {
    struct tsg_clone_size size = { 0 };
    for (int i = 0; i < c->n_inputs; i++) {
        size.input[i] = size.total;
        size.total   += padded(ggml_nbytes(c->input[i]));
    }
    size.rows   = size.total;
    size.total += padded((size_t) n * sizeof(int32_t));
    for (int i = 0; i < c->n_inputs; i++) {
        size.total += padded((size_t) (n * c->input[i]->ne[0]) * sizeof(float));
    }
    for (int i = 0; i < c->n_nodes; i++) {  // and the scales, of which a node may have one
        size.total += padded((size_t) (n * c->node[i]->ne[0]) * sizeof(float)) + padded((size_t) n * sizeof(float));
    }
    return size;
}

struct ggml_context * tsg_clone_context(void) {
    const size_t tensors = 4 * TSG_CHAIN_NODES * ggml_tensor_overhead();
    return ggml_init((struct ggml_init_params) { .mem_size = tensors + ggml_graph_overhead_custom(CLONE_NODES, false), .no_alloc = true });
}

struct cloner {
    const struct tsg_chain * chain;
    struct ggml_context *    ctx;
    uint8_t *                memory;  // the next free byte
    const struct tsg_pair *  pairs;
    int64_t                  n;
    struct ggml_tensor *     ids;
    struct ggml_tensor *     input[TSG_CHAIN_INPUTS];
    struct ggml_tensor *     node[TSG_CHAIN_NODES];
};

static struct ggml_tensor * new_tensor(struct cloner * k, enum ggml_type type, int64_t ne0, int64_t ne1) {
    struct ggml_tensor * t = ggml_new_tensor_2d(k->ctx, type, ne0, ne1);
    t->data    = k->memory;
    k->memory += padded(ggml_nbytes(t));
    return t;
}

// The rows of an input that the pairs want.
static struct ggml_tensor * gather_input(struct cloner * k, const struct ggml_tensor * input, const uint8_t * bytes) {
    struct ggml_tensor * t = new_tensor(k, GGML_TYPE_F32, input->ne[0], k->n);
    for (int64_t i = 0; i < k->n; i++) {
        const size_t row = (input->ne[1] > 1 ? (size_t) k->pairs[i].used * input->nb[1] : 0) + (input->ne[2] > 1 ? (size_t) k->pairs[i].token * input->nb[2] : 0);
        memcpy((uint8_t *) t->data + (size_t) i * t->nb[1], bytes + row, t->nb[1]);
    }
    return t;
}

static struct ggml_tensor * gather_scales(struct cloner * k, const struct tsg_weight * w) {
    struct ggml_tensor * t = new_tensor(k, GGML_TYPE_F32, 1, k->n);
    for (int64_t i = 0; i < k->n; i++) {
        ((float *) t->data)[i] = w->scale[k->pairs[i].expert];
    }
    return t;
}

static struct ggml_tensor * clone_src(struct cloner * k, const struct ggml_tensor * src) {
    const int                 made  = find(k->chain->node, k->chain->n_nodes, src);
    const struct tsg_weight * scale = made < 0 ? tsg_step_scale(k->chain->step, src) : NULL;
    return made >= 0 ? k->node[made] : scale ? gather_scales(k, scale) : k->input[find(k->chain->input, k->chain->n_inputs, src)];
}

static struct ggml_tensor * clone_matmul(struct cloner * k, const struct ggml_tensor * node, const struct tsg_weight * w) {
    struct ggml_tensor * weight = ggml_new_tensor_3d(k->ctx, w->type, w->ne0, w->ne1, w->layer->n_expert);
    weight->data                = (void *) w->host;
    struct ggml_tensor * t      = ggml_mul_mat_id(k->ctx, weight, clone_src(k, node->src[1]), k->ids);
    t->data    = k->memory;
    k->memory += padded(ggml_nbytes(t));
    return t;
}

static struct ggml_tensor * clone_bias(struct cloner * k, const struct ggml_tensor * node, const struct tsg_weight * w) {
    struct ggml_tensor * table = ggml_new_tensor_2d(k->ctx, GGML_TYPE_F32, w->ne1, w->layer->n_expert);
    table->data                = w->bias;
    struct ggml_tensor * t     = ggml_add_id(k->ctx, clone_src(k, node->src[0]), table, k->ids);
    t->data    = k->memory;
    k->memory += padded(ggml_nbytes(t));
    return t;
}

// In place or a view: the memory of its source, whose rows it keeps.
static struct ggml_tensor * clone_view(struct cloner * k, const struct ggml_tensor * node) {
    const struct ggml_tensor * src   = node->src[0];
    const size_t               begin = node->view_offs - (src->view_src ? src->view_offs : 0);
    struct ggml_tensor *       from  = clone_src(k, src);
    return ggml_view_2d(k->ctx, from, node->ne[0], k->n, from->nb[1], begin);
}

static struct ggml_tensor * clone_node(struct cloner * k, const struct ggml_tensor * node) {
    const struct tsg_step *   step = k->chain->step;
    const struct tsg_weight * w;
    if ((w = tsg_step_matmul(step, node))) {
        return clone_matmul(k, node, w);
    }
    if ((w = tsg_step_bias(step, node))) {
        return clone_bias(k, node, w);
    }
    struct ggml_tensor * t = node->view_src ? clone_view(k, node) : new_tensor(k, GGML_TYPE_F32, node->ne[0], k->n);
    if (node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE) {
        return t;
    }
    t->op = node->op;
    memcpy(t->op_params, node->op_params, sizeof(t->op_params));
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        t->src[i] = node->src[i] ? clone_src(k, node->src[i]) : NULL;
    }
    return t;
}

struct ggml_cgraph * tsg_chain_clone(const struct tsg_chain * c, struct ggml_context * ctx, uint8_t * memory, const struct tsg_pair * pairs, int64_t n,
                                     struct ggml_tensor ** out) {
    const struct tsg_clone_size size = tsg_clone_measure(c, n);
    struct cloner               k    = { .chain = c, .ctx = ctx, .memory = memory + size.rows, .pairs = pairs, .n = n };
    ggml_reset(ctx);
    k.ids = new_tensor(&k, GGML_TYPE_I32, n, 1);
    for (int64_t i = 0; i < n; i++) {
        ((int32_t *) k.ids->data)[i] = pairs[i].expert;
    }
    for (int i = 0; i < c->n_inputs; i++) {
        k.input[i] = gather_input(&k, c->input[i], memory + size.input[i]);
    }
    struct ggml_cgraph * graph = ggml_new_graph_custom(ctx, CLONE_NODES, false);
    for (int i = 0; i < c->n_nodes; i++) {
        k.node[i] = clone_node(&k, c->node[i]);
        ggml_build_forward_expand(graph, k.node[i]);
    }
    GGML_ASSERT(k.memory <= memory + size.total);
    *out = k.node[c->n_nodes - 1];
    return graph;
}
