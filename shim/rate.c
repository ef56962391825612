// rate.c - how fast the CPU computes experts from the host pool, for models whose misses it does not compute: what llama.cpp's own split would cost.
#include "pager.h"

#include <stdlib.h>

#define MAX_LAYERS 16  // that are timed, so that no cache holds what they read
#define N_NODES    (2 * TSG_MAX_PARTS)

static struct ggml_tensor * placed(struct ggml_tensor * tensor, void * data) {
    tensor->data = data;
    return tensor;
}

// Every matmul of a layer's experts for one token, over experts from `first` on where they lie.
static struct ggml_cgraph * build(struct ggml_context * ctx, const struct tsg_layer * layer, int32_t first, float * x, float * y, int32_t * ids) {
    struct ggml_cgraph * graph = ggml_new_graph_custom(ctx, N_NODES, false);
    struct ggml_tensor * chosen = placed(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, layer->n_used, 1), ids);
    for (int32_t i = 0; i < layer->n_used; i++) {
        ids[i] = (first + i) % layer->n_expert;
    }
    for (int32_t p = 0; p < layer->n_parts; p++) {
        const struct tsg_weight * w      = &layer->weight[p];
        struct ggml_tensor *      weight = placed(ggml_new_tensor_3d(ctx, w->type, w->ne0, w->ne1, layer->n_expert), (void *) w->host);
        struct ggml_tensor *      in     = placed(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, w->ne0, layer->n_used, 1), x);
        ggml_build_forward_expand(graph, placed(ggml_mul_mat_id(ctx, weight, in, chosen), y));
    }
    return graph;
}

static int by_size(const void * a, const void * b) {
    const uint64_t x = *(const uint64_t *) a, y = *(const uint64_t *) b;
    return (x > y) - (x < y);
}

// The median, because a layer whose pages come from the disk says nothing.
static double run(struct tsg_pager * pager, ggml_backend_t cpu, struct ggml_context * ctx, float * x, float * y, int32_t * ids) {
    uint64_t      ns[MAX_LAYERS];
    const int32_t n = pager->n_layers < MAX_LAYERS ? pager->n_layers : MAX_LAYERS;
    for (int32_t i = -1; i < n; i++) {  // the first one starts the threads
        const struct tsg_layer * layer = pager->layers[i < 0 ? pager->n_layers - 1 : i * pager->n_layers / n];
        ggml_reset(ctx);
        struct ggml_cgraph * graph = build(ctx, layer, i < 0 ? 0 : i * layer->n_used, x, y, ids);
        const uint64_t       start = tsg_nanoseconds();
        if (ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS) {
            return 0;
        }
        if (i >= 0) {
            ns[i] = (tsg_nanoseconds() - start) / (uint64_t) layer->n_used;
        }
    }
    qsort(ns, (size_t) n, sizeof(ns[0]), by_size);
    return (double) ns[n / 2] / 1e9;
}

double tsg_pager_cpu_seconds(struct tsg_pager * pager, void * cpu_device, int32_t n_threads) {
    ggml_backend_reg_t           reg = ggml_backend_dev_backend_reg(cpu_device);
    ggml_backend_set_n_threads_t set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    int64_t in = 1, out = 1, n_used = 1;
    for (int32_t i = 0; i < pager->n_layers; i++) {
        n_used = pager->layers[i]->n_used > n_used ? pager->layers[i]->n_used : n_used;
        for (int32_t p = 0; p < pager->layers[i]->n_parts; p++) {
            in  = pager->layers[i]->weight[p].ne0 > in ? pager->layers[i]->weight[p].ne0 : in;
            out = pager->layers[i]->weight[p].ne1 > out ? pager->layers[i]->weight[p].ne1 : out;
        }
    }
    const size_t          tensors = (1 + 3 * TSG_MAX_PARTS) * ggml_tensor_overhead() + ggml_graph_overhead_custom(N_NODES, false);
    struct ggml_context * ctx = ggml_init((struct ggml_init_params) { .mem_size = tensors, .no_alloc = true });
    ggml_backend_t        cpu = pager->ready && set && n_threads > 0 ? ggml_backend_dev_init(cpu_device, NULL) : NULL;
    float *               x   = calloc((size_t) (in * n_used), sizeof(float));
    float *               y   = calloc((size_t) (out * n_used), sizeof(float));
    int32_t *             ids = calloc((size_t) n_used, sizeof(int32_t));
    double                seconds = 0;
    if (ctx && cpu && x && y && ids && pager->n_layers > 0) {
        set(cpu, n_threads);
        seconds = run(pager, cpu, ctx, x, y, ids);
    }
    free(ids);
    free(y);
    free(x);
    if (cpu) {
        ggml_backend_free(cpu);
    }
    ggml_free(ctx);
    return seconds;
}
