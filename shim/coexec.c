// coexec.c - one step with two computers: what is in slots on the inner device, what is not on the CPU.
//
// The graph is cut a second time, behind the expert chain. In between the device computes the chain with the CPU's pairs pointed at a slot of zeros, and the
// CPU computes a clone of it for just those pairs, over the host pool. Its rows are then written over the zeros, and the graph goes on with the router's
// weights. On a CPU inner device that gives the bits of llama.cpp; on CUDA the two round differently.
#include "coexec.h"

#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NO_MEMORY "no host memory for computing misses on the CPU"
#define RATE_SKIP 16  // first layers, whose experts may come from the disk

// ---- what a pager does with misses ----

// ggml-cuda may sort the rows of weights that are not quantised by expert, and then asserts that a token wants no expert twice, as the slot of zeros is.
static const struct tsg_weight * find_unquantized(const struct tsg_pager * pager) {
    for (int32_t i = 0; i < pager->n_layers && !pager->inner_is_cpu; i++) {
        for (int32_t p = 0; p < pager->layers[i]->n_parts; p++) {
            if (!ggml_is_quantized(pager->layers[i]->weight[p].type)) {
                return &pager->layers[i]->weight[p];
            }
        }
    }
    return NULL;
}

void tsg_coexec_describe(struct tsg_pager * pager) {
    struct tsg_coexec * x = &pager->coexec;
    char admission[128] = "no miss enters the pool", threads[32] = "";
    if (x->cpu) {
        snprintf(threads, sizeof(threads), "%d thread%s", x->cpu->n_threads, x->cpu->n_threads == 1 ? "" : "s");
    }
    if (x->miss.every > 0) {
        snprintf(admission, sizeof(admission), "at most one in %d enters the pool", x->miss.every);
    }
    if (x->cannot) {
        snprintf(x->text, sizeof(x->text), "fetched: %s", x->why);
    } else if (tsg_all_resident(pager)) {
        snprintf(x->text, sizeof(x->text), "none, every expert is resident");
    } else if (x->miss.mode == TSG_MISS_FETCH) {
        snprintf(x->text, sizeof(x->text), "fetched%s", x->cpu || pager->inner_is_cpu ? "" : "; --miss auto finds out whether the CPU would be faster");
    } else if (x->miss.mode == TSG_MISS_LAYERS) {
        int32_t n, all;
        tsg_layers_count(pager, &n, &all);
        snprintf(x->text, sizeof(x->text), "none in the last %d of %d layers, whose experts stay on the device; in the others computed by the CPU with %s, %s", n,
                 all, threads, admission);
    } else if (x->miss.mode == TSG_MISS_CPU) {
        snprintf(x->text, sizeof(x->text), "computed by the CPU with %s, %s", threads, admission);
    } else if (x->miss.cpu_rate > 0) {
        snprintf(x->text, sizeof(x->text), "split between the link (%.1f GB/s) and the CPU (%.1f GB/s, %s), %s", x->miss.link_rate / 1e9,
                 x->miss.cpu_rate / 1e9, threads, admission);
    } else {
        snprintf(x->text, sizeof(x->text), "computed by the CPU with %s until its speed is known, then split with the link (%.1f GB/s)", threads,
                 x->miss.link_rate / 1e9);
    }
}

const char * tsg_pager_miss(struct tsg_pager * pager) {
    static _Thread_local char text[sizeof(pager->coexec.text)];  // the pager's own is written anew while others read
    tsg_pager_lock(pager);
    memcpy(text, pager->coexec.text, sizeof(text));
    tsg_pager_unlock(pager);
    return text;
}

enum tsg_status tsg_pager_use_cpu(struct tsg_pager * pager, void * cpu_device, int32_t n_threads) {
    if (pager->committed || pager->coexec.cpu) {
        return tsg_fail(TSG_E_STATE, "the CPU joins once, before commit");
    }
    if (!cpu_device || ggml_backend_dev_type(cpu_device) != GGML_BACKEND_DEVICE_TYPE_CPU || n_threads < 1 || n_threads > GGML_MAX_N_THREADS) {
        return tsg_fail(TSG_E_ARGUMENT, "misses are computed by a CPU device with 1 to %d threads, not %d", GGML_MAX_N_THREADS, n_threads);
    }
    pager->coexec.cpu = tsg_cpu_new(cpu_device, n_threads);
    return pager->coexec.cpu ? TSG_OK : tsg_fail(TSG_E_MEMORY, "there is no memory or no thread for computing misses on the CPU");
}

enum tsg_status tsg_pager_set_miss(struct tsg_pager * pager, const struct tsg_miss * miss) {
    struct tsg_coexec * x = &pager->coexec;
    if (!pager->ready) {
        return tsg_fail(TSG_E_STATE, "the model is not loaded");
    }
    if (miss->mode < TSG_MISS_FETCH || miss->mode > TSG_MISS_LAYERS || miss->every < 0 || miss->link_rate < 0 || miss->cpu_rate < 0 ||
        (miss->mode == TSG_MISS_SPLIT && miss->link_rate <= 0)) {
        return tsg_fail(TSG_E_ARGUMENT, "there is no such way to handle misses");
    }
    if (miss->mode != TSG_MISS_FETCH && !x->cpu) {
        return tsg_fail(TSG_E_STATE, "the model was loaded without the CPU for its misses");
    }
    tsg_pager_lock(pager);
    tsg_admit_settle(pager);
    const bool was_layers = x->miss.mode == TSG_MISS_LAYERS;
    x->miss      = *miss;
    x->credit    = 0;
    x->cpu_steps = 0;
    x->cpu_ns = x->cpu_bytes = 0;
    const struct tsg_weight * w = find_unquantized(pager);
    if (w && miss->mode != TSG_MISS_FETCH && !x->cannot) {
        x->cannot = true;
        snprintf(x->why, sizeof(x->why), "%s is %s: on a GPU only quantised experts can be left to the CPU", w->name, ggml_type_name(w->type));
    }
    const bool layers = tsg_coexec_on(pager) && miss->mode == TSG_MISS_LAYERS;
    bool       ok     = true;
    if (was_layers != layers) {
        tsg_engine_wait(pager);  // kernels may read the slots that are overwritten
        tsg_resident_to_host(pager);
    }
    if (was_layers && !layers) {
        tsg_layers_release(pager, true);
    } else if (layers && !was_layers) {
        ok            = tsg_layers_place(pager);
        x->miss.mode = ok ? TSG_MISS_LAYERS : TSG_MISS_FETCH;
    }
    tsg_coexec_describe(pager);
    tsg_pager_unlock(pager);
    return ok ? TSG_OK : TSG_E_MEMORY;
}

bool tsg_coexec_on(const struct tsg_pager * pager) {
    return pager->coexec.miss.mode != TSG_MISS_FETCH && !pager->coexec.cannot && !tsg_all_resident(pager);
}

bool tsg_coexec_lost(const struct tsg_pager * pager) {
    return tsg_cpu_is_lost(pager->coexec.cpu);
}

void tsg_coexec_free(struct tsg_pager * pager) {
    struct tsg_coexec * x = &pager->coexec;
    for (int32_t i = 0; i < TSG_MAX_PENDING; i++) {
        ggml_backend_event_free(x->pending[i].done);
    }
    tsg_cpu_free(x->cpu);
}

// ---- an engine's part ----

void tsg_corun_free(struct tsg_engine * e) {
    struct tsg_corun * r = e->corun;
    if (r && !tsg_coexec_lost(e->pager)) {
        ggml_backend_buffer_free(r->buffer);
        ggml_free(r->ctx);
        free(r);
    }
}

static bool make_corun(struct tsg_engine * e) {
    struct tsg_corun * r = e->corun ? e->corun : calloc(1, sizeof(struct tsg_corun));
    if (r && !r->ctx) {
        r->ctx = tsg_clone_context();
    }
    e->corun = r;
    return r && r->ctx;
}

// Memory for a clone of as many pairs as the step has.
static bool reserve(struct tsg_engine * e, const struct tsg_step * step) {
    struct tsg_corun * r    = e->corun;
    const size_t       size = tsg_clone_measure(&r->chain, ggml_nelements(step->ids)).total;
    if (size > r->size) {
        bool pinned;
        ggml_backend_synchronize(e->inner);  // its rows may still be read
        ggml_backend_buffer_free(r->buffer);
        r->buffer = tsg_host_alloc(e->pager, size, &pinned);
        r->size   = r->buffer ? size : 0;
    }
    return size <= r->size;
}

bool tsg_coexec_can(const struct tsg_engine * e, const struct tsg_step * step) {
    return tsg_coexec_on(e->pager) && step->ids->ne[1] <= TSG_DECODE_TOKENS && step->ids->ne[1] <= tsg_engine_step_tokens(e, step) &&
           ggml_nelements(step->ids) <= TSG_MAX_PAIRS;
}

// ---- one step ----

// Brings the chain's inputs along with the router's ids: one wait for both.
static bool read_inputs(struct tsg_engine * e, const struct tsg_step * step) {
    struct tsg_corun *          r    = e->corun;
    const struct tsg_clone_size size = tsg_clone_measure(&r->chain, ggml_nelements(step->ids));
    r->memory                        = ggml_backend_buffer_get_base(r->buffer);
    for (int i = 0; i < r->chain.n_inputs; i++) {
        ggml_backend_tensor_get_async(e->inner, r->chain.input[i], r->memory + size.input[i], 0, ggml_nbytes(r->chain.input[i]));
    }
    return tsg_engine_read_ids(e, step);
}

// Looks the experts up. `missing` becomes those that are in no slot, or still on their way.
static bool look_up(struct tsg_engine * e, const struct tsg_step * step, bool * missing) {
    struct tsg_slots *  slots  = &tsg_engine_pool(e, step)->slots;
    struct tsg_counts * counts = &e->pager->counts[TSG_DECODE];
    if (tsg_slots_acquire(slots, e->global, e->n_distinct, TSG_DECODE, TSG_ADMIT_FREE, 0, e->slot, e->loads, counts) < 0) {
        tsg_fail(TSG_E_MEMORY, "no memory for the bookkeeping of a layer");
        return false;
    }
    for (int32_t i = 0; i < e->n_distinct; i++) {
        const int32_t x = e->global[i];
        missing[i]      = e->slot[i] < 0 || slots->loading[x];
        if (e->slot[i] >= 0 && slots->loading[x]) {
            slots->hits[x]--;
            slots->misses[x]++;
            counts->hits--;
            counts->misses++;
        }
    }
    return true;
}

// Lists what the CPU computes, by token and place.
static void list_pairs(struct tsg_engine * e, const struct tsg_step * step, const bool * missing) {
    struct tsg_corun * r      = e->corun;
    const int32_t      n_used = (int32_t) step->ids->ne[0], n_tokens = (int32_t) step->ids->ne[1];
    for (int32_t i = 0; i < e->n_distinct; i++) {
        r->on_cpu[e->distinct[i]] = missing[i];
        e->slot[i]                = missing[i] ? tsg_engine_pool(e, step)->n_slots : e->slot[i];  // the slot of zeros
    }
    r->n_pairs = 0;
    for (int32_t i = 0; i < n_used * n_tokens; i++) {
        if (r->on_cpu[e->ids[i]]) {
            r->pairs[r->n_pairs++] = (struct tsg_pair) { .token = i / n_used, .used = i % n_used, .expert = e->ids[i] };
        }
    }
}

// The CPU's rows over the zeros, neighbours in one piece.
static void write_rows(struct tsg_engine * e, const struct ggml_tensor * rows) {
    const struct tsg_corun * r   = e->corun;
    struct ggml_tensor *     out = tsg_chain_out(&r->chain);
    for (int32_t i = 0, end; i < r->n_pairs; i = end) {
        const struct tsg_pair * p = &r->pairs[i];
        for (end = i + 1; end < r->n_pairs && r->pairs[end].token == p->token && r->pairs[end].used == p->used + end - i && out->nb[1] == rows->nb[1]; end++) {
        }
        ggml_backend_tensor_set_async(e->inner, out, (const char *) rows->data + (size_t) i * rows->nb[1],
                                      (size_t) p->used * out->nb[1] + (size_t) p->token * out->nb[2], (size_t) (end - i) * rows->nb[1]);
    }
}

// How fast the CPU computes experts, for split: measured once, then fixed, so that a run goes on as it began.
static void measure_cpu(struct tsg_engine * e, const struct tsg_step * step, int32_t n_experts) {
    struct tsg_coexec * x = &e->pager->coexec;
    if (x->miss.mode != TSG_MISS_SPLIT || x->miss.cpu_rate > 0 || x->cpu_steps++ < RATE_SKIP) {
        return;
    }
    x->cpu_ns    += x->cpu->took_ns;
    x->cpu_bytes += (uint64_t) n_experts * tsg_layer_expert_bytes(step->layer);
    if (x->cpu_steps >= RATE_SKIP + TSG_RATE_STEPS && x->cpu_ns > 0) {
        x->miss.cpu_rate = (double) x->cpu_bytes * 1e9 / (double) x->cpu_ns;
        tsg_coexec_describe(e->pager);
    }
}

// The device's part: from the first expert matmul to the end of the chain, always the same piece of the graph, so that ggml-cuda can keep its CUDA graph.
static bool compute_on_device(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step) {
    return tsg_engine_use_slots(e, graph, step) && tsg_engine_compute_range(e, graph, step->first, e->corun->chain.end) == GGML_STATUS_SUCCESS;
}

// Device and CPU side by side.
static bool compute_on_both(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step) {
    struct tsg_corun *   r      = e->corun;
    struct tsg_cpu *     cpu    = e->pager->coexec.cpu;
    struct tsg_notes *   notes  = &e->pager->notes;
    int32_t              n      = 0;
    struct ggml_tensor * rows;
    tsg_cpu_start(cpu, tsg_chain_clone(&r->chain, r->ctx, r->memory, r->pairs, r->n_pairs, &rows));
    const bool     ok    = compute_on_device(e, graph, step) && tsg_admit_later(e, step, r->missing);
    const uint64_t start = tsg_nanoseconds();
    if (!tsg_cpu_wait(cpu) || !ok) {
        return false;
    }
    notes->wait_cpu_ns += tsg_nanoseconds() - start;
    notes->cpu_ns      += cpu->took_ns;
    e->pager->counts[TSG_DECODE].cpu_rows += (uint64_t) r->n_pairs;
    write_rows(e, rows);
    for (int32_t i = 0; i < e->n_distinct; i++) {
        n += r->missing[i];
    }
    measure_cpu(e, step, n);
    return true;
}

bool tsg_coexec_step(struct tsg_engine * e, struct ggml_cgraph * graph, const struct tsg_step * step, int * done) {
    struct tsg_coexec * x = &e->pager->coexec;
    if (!tsg_cpu_ready(x->cpu)) {
        return false;
    }
    if (!make_corun(e)) {
        tsg_fail(TSG_E_MEMORY, NO_MEMORY);
        return false;
    }
    struct tsg_corun * r = e->corun;
    if (!tsg_chain_find(&r->chain, graph, step)) {  // this model fetches
        x->cannot = true;
        snprintf(x->why, sizeof(x->why), "%s", tsg_last_error());
        tsg_layers_release(e->pager, false);
        tsg_coexec_describe(e->pager);
        ggml_log_internal(GGML_LOG_LEVEL_WARN, "tinyserve: misses are %s\n", x->text);
        return tsg_engine_run_step(e, graph, step, TSG_DECODE);
    }
    if (!reserve(e, step)) {
        tsg_fail(TSG_E_MEMORY, NO_MEMORY);
        return false;
    }
    if (!read_inputs(e, step) || !look_up(e, step, r->missing) || tsg_admit_fetch(e, step, r->missing) < 0) {
        return false;
    }
    list_pairs(e, step, r->missing);
    *done = r->chain.end;
    return r->n_pairs == 0 ? compute_on_device(e, graph, step) : compute_on_both(e, graph, step);
}
