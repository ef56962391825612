// measure.c - how fast this machine moves and multiplies, and how much memory it locks: for `doctor`. Nothing here knows of a model.
#define _DEFAULT_SOURCE  // mlock, MAP_ANONYMOUS

#include "pager.h"

#include "ggml-alloc.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <threads.h>
#include <time.h>

#define MAX_PIECES  1024
#define MAX_READERS 512

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

static struct ggml_context * tensors(int n) {
    return ggml_init((struct ggml_init_params) { .mem_size = (size_t) n * ggml_tensor_overhead() + ggml_graph_overhead(), .no_alloc = true });
}

// ---- copies ----

static ggml_backend_buffer_type_t pinned_type(ggml_backend_dev_t device) {
    return ggml_backend_dev_host_buffer_type(device);
}

// Page-locked memory, or NULL: CUDA's buffer type gives ordinary memory where it gets no other, and the buffer's type tells.
static ggml_backend_buffer_t alloc_pinned(ggml_backend_dev_t device, size_t size) {
    ggml_backend_buffer_t buffer = pinned_type(device) ? ggml_backend_buft_alloc_buffer(pinned_type(device), size) : NULL;
    if (buffer && ggml_backend_buffer_get_type(buffer) != pinned_type(device)) {
        ggml_backend_buffer_free(buffer);
        return NULL;
    }
    return buffer;
}

double tsg_measure_copy(void * device, bool to_device, bool pinned, size_t size, int32_t repeats) {
    struct ggml_context * ctx    = tensors(1);
    struct ggml_tensor *  tensor = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (int64_t) size);
    ggml_backend_t        stream = ggml_backend_dev_init(device, NULL);
    ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(device));
    ggml_backend_buffer_t host   = pinned ? alloc_pinned(device, size) : ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    double                rate   = 0;
    if (stream && memory && host) {
        void * data = ggml_backend_buffer_get_base(host);
        memset(data, 1, size);
        double start = 0;
        for (int32_t i = -1; i < repeats; i++) {  // the first copy warms up
            if (to_device) {
                ggml_backend_tensor_set_async(stream, tensor, data, 0, size);
            } else {
                ggml_backend_tensor_get_async(stream, tensor, data, 0, size);
            }
            if (i < 0) {
                ggml_backend_synchronize(stream);
                start = now();
            }
        }
        ggml_backend_synchronize(stream);
        rate = (double) size * repeats / (now() - start);
    }
    ggml_backend_buffer_free(host);
    ggml_backend_buffer_free(memory);
    if (stream) {
        ggml_backend_free(stream);
    }
    ggml_free(ctx);
    return rate;
}

// ---- computing ----

static void set_threads(ggml_backend_dev_t device, ggml_backend_t backend, int32_t n_threads) {
    ggml_backend_reg_t           reg = ggml_backend_dev_backend_reg(device);
    ggml_backend_set_n_threads_t set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set) {
        set(backend, n_threads);
    }
}

// Seconds of one graph, the least of some: whatever else runs makes it slower, never faster. Negative: it failed.
static double best_of(ggml_backend_t backend, struct ggml_cgraph * graph, int32_t repeats) {
    double best = -1;
    for (int32_t i = -1; i < repeats; i++) {
        const double start = now();
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            return -1;
        }
        const double seconds = now() - start;
        best = i >= 0 && (best < 0 || seconds < best) ? seconds : best;
    }
    return best;
}

double tsg_measure_device_memory(void * device, size_t size, int32_t n_threads, int32_t repeats) {
    struct ggml_context * ctx  = tensors(3);
    struct ggml_tensor *  from = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, (int64_t) (size / sizeof(float)));
    struct ggml_tensor *  to   = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, (int64_t) (size / sizeof(float)));
    struct ggml_cgraph *  graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, ggml_cpy(ctx, from, to));
    ggml_backend_t        backend = ggml_backend_dev_init(device, NULL);
    ggml_backend_buffer_t memory  = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(device));
    double                seconds = -1;
    if (backend && memory) {
        ggml_backend_buffer_clear(memory, 0);
        set_threads(device, backend, n_threads);
        seconds = best_of(backend, graph, repeats);
    }
    ggml_backend_buffer_free(memory);
    if (backend) {
        ggml_backend_free(backend);
    }
    ggml_free(ctx);
    return seconds > 0 ? 2 * (double) size / seconds : 0;
}

double tsg_measure_experts(void * device, const struct tsg_experts_load * load, int32_t n_threads, int32_t repeats) {
    struct ggml_context * ctx   = tensors(4);
    struct ggml_tensor *  w     = ggml_new_tensor_3d(ctx, (enum ggml_type) load->type, load->ne0, load->ne1, load->n_expert);
    struct ggml_tensor *  x     = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, load->ne0, 1, load->n_tokens);
    struct ggml_tensor *  ids   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, load->n_used, load->n_tokens);
    struct ggml_tensor *  out   = ggml_mul_mat_id(ctx, w, x, ids);
    struct ggml_cgraph *  graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    const bool            able    = ggml_backend_dev_supports_op(device, out);
    ggml_backend_t        backend = able ? ggml_backend_dev_init(device, NULL) : NULL;
    ggml_backend_buffer_t memory  = backend ? ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(device)) : NULL;
    int32_t *             chosen  = malloc(sizeof(int32_t) * (size_t) (load->n_used * load->n_tokens));
    double                seconds = -1;
    if (memory && chosen) {
        ggml_backend_buffer_clear(memory, 0);
        set_threads(device, backend, n_threads);
        for (int32_t i = -1; i < repeats; i++) {  // other experts each time, so that no cache holds them
            for (int64_t k = 0; k < load->n_used * load->n_tokens; k++) {
                chosen[k] = (int32_t) ((k + (i + 1) * load->n_used) % load->n_expert);
            }
            ggml_backend_tensor_set(ids, chosen, 0, ggml_nbytes(ids));
            const double start = now();
            if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
                seconds = -1;
                break;
            }
            const double took = now() - start;
            seconds           = i >= 0 && (seconds < 0 || took < seconds) ? took : seconds;
        }
    }
    free(chosen);
    ggml_backend_buffer_free(memory);
    if (backend) {
        ggml_backend_free(backend);
    }
    ggml_free(ctx);
    return seconds > 0 ? seconds : 0;
}

// ---- host memory ----

struct reader {
    const uint64_t * data;
    size_t           n;
    int32_t          repeats;
    uint64_t         sum;
};

static int read_all(void * arg) {
    struct reader * r = arg;
    uint64_t        a = 0, b = 0, c = 0, d = 0;  // independent sums, so that loads do not wait for additions
    for (int32_t i = 0; i < r->repeats; i++) {
        for (size_t k = 0; k + 4 <= r->n; k += 4) {
            a += r->data[k];
            b += r->data[k + 1];
            c += r->data[k + 2];
            d += r->data[k + 3];
        }
        __asm__ volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d) : : "memory");  // the next pass reads again
    }
    r->sum = a + b + c + d;
    return 0;
}

double tsg_measure_host_memory(size_t size, int32_t n_threads, int32_t repeats) {
    struct reader readers[MAX_READERS];
    thrd_t        threads[MAX_READERS];
    uint64_t *    data = n_threads > 0 && n_threads <= MAX_READERS ? malloc(size) : NULL;
    if (!data) {
        return 0;
    }
    memset(data, 1, size);
    const size_t share = size / sizeof(uint64_t) / (size_t) n_threads;
    int32_t      n     = 0;
    const double start = now();
    for (; n < n_threads; n++) {
        readers[n] = (struct reader) { .data = data + (size_t) n * share, .n = share, .repeats = repeats };
        if (thrd_create(&threads[n], read_all, &readers[n]) != thrd_success) {
            break;
        }
    }
    for (int32_t i = 0; i < n; i++) {
        thrd_join(threads[i], NULL);
    }
    const double seconds = now() - start;
    free(data);
    return n == n_threads ? (double) (share * sizeof(uint64_t)) * n_threads * repeats / seconds : 0;
}

uint64_t tsg_measure_lockable(void * device, uint64_t most, size_t piece) {
    ggml_backend_buffer_t buffers[MAX_PIECES];
    void *                maps[MAX_PIECES];
    const bool            has_type = pinned_type(device) != NULL;
    uint64_t              total    = 0;
    int32_t               n        = 0;
    for (; n < MAX_PIECES && total + piece <= most; n++) {
        buffers[n] = has_type ? alloc_pinned(device, piece) : NULL;
        maps[n]    = has_type ? NULL : mmap(NULL, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (has_type ? !buffers[n] : maps[n] == MAP_FAILED) {
            break;
        }
        if (!has_type && mlock(maps[n], piece) != 0) {
            munmap(maps[n], piece);
            break;
        }
        total += piece;
    }
    while (n-- > 0) {
        ggml_backend_buffer_free(buffers[n]);
        if (maps[n]) {
            munmap(maps[n], piece);
        }
    }
    return total;
}
