// edges.c - lets our kernel run beside the one that follows it in a captured graph.
//
// The inner stream waits for tsg_step before it goes on, and what it goes on with is a kernel that quantises the activations: it reads neither slots nor slot
// ids. In the captured graph the wait is moved one kernel further, to the matmul, so that the lookup costs next to nothing when all experts are resident.
// The same for tsg_rest and the last matmul.
// Needs driver calls of CUDA 12.3; without them graphs stay as they were captured.
#include "engine.h"

#include <stdlib.h>
#include <string.h>

enum { KERNEL_NODE = 0 };

struct kernel_params {  // CUDA_KERNEL_NODE_PARAMS_v2
    void *   func;
    unsigned grid[3], block[3], shared;
    void **  params;
    void **  extra;
    void *   kernel;
    void *   context;
};

static bool kernel_of(const struct tsg_cuda * cuda, tsg_cu_node node, struct kernel_params * params) {
    int type = -1;
    return cuda->node_type(node, &type) == 0 && type == KERNEL_NODE && cuda->kernel_params(node, params) == 0;
}

static bool quantises(const struct tsg_cuda * cuda, tsg_cu_node node) {
    struct kernel_params params = { 0 };
    const char *         name   = NULL;
    if (!kernel_of(cuda, node, &params)) {
        return false;
    }
    const tsg_cu_result result = params.func ? cuda->func_name(&name, params.func) : cuda->kernel_name(&name, params.kernel);
    return result == 0 && name && strstr(name, "quantize");
}

// Moves the edge from -> next to the nodes behind `next`.
static bool move_edge(const struct tsg_cuda * cuda, tsg_cu_graph graph, tsg_cu_node from, tsg_cu_node next, struct tsg_cu_edge edge) {
    tsg_cu_node        behind[8];
    struct tsg_cu_edge edges[8];
    size_t             n = 8;
    if (cuda->node_dependents(next, behind, edges, &n) != 0 || n == 0 || n > 8) {
        return false;
    }
    const struct tsg_cu_edge plain = { 0 };
    for (size_t i = 0; i < n; i++) {
        if (cuda->add_dependencies(graph, &from, &behind[i], &plain, 1) != 0) {
            return false;
        }
    }
    return cuda->remove_dependencies(graph, &from, &next, &edge, 1) == 0;
}

int tsg_edges_relax(const struct tsg_cuda * cuda, tsg_cu_graph graph) {
    size_t n = 0;
    if (!cuda->can_edit || cuda->graph_nodes(graph, NULL, &n) != 0) {
        return 0;
    }
    tsg_cu_node * nodes = malloc(n * sizeof(tsg_cu_node));
    int           moved = 0;
    if (!nodes || cuda->graph_nodes(graph, nodes, &n) != 0) {
        n = 0;
    }
    for (size_t i = 0; i < n; i++) {
        struct kernel_params params = { 0 };
        tsg_cu_node          next[8];
        struct tsg_cu_edge   edges[8];
        size_t               n_next = 8;
        if (!kernel_of(cuda, nodes[i], &params) || (params.func != cuda->step && params.func != cuda->rest) || cuda->node_dependents(nodes[i], next, edges, &n_next) != 0 || n_next > 8) {
            continue;
        }
        for (size_t j = 0; j < n_next; j++) {
            moved += quantises(cuda, next[j]) && move_edge(cuda, graph, nodes[i], next[j], edges[j]);
        }
    }
    free(nodes);
    return moved;
}
