// host.c - the host pool: climbs down the ladder of host.h, and reads what stays resident into its slots.
#define _DEFAULT_SOURCE  // madvise

#include "pager.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

#define SLOW_CHUNK_S 30  // a just-written file can take minutes to register

// ---- life ----

void tsg_host_init(struct tsg_pager * pager) {
    pager->host.ops         = tsg_pin_ops_of(pager);
    pager->host.chunk_bytes = TSG_CHUNK_BYTES;
}

static void unregister(struct tsg_pager * pager, struct tsg_chunk * chunk) {
    if (chunk->registered) {
        pager->host.ops->unregister_range(pager, chunk->map);
        chunk->registered = false;
    }
}

static void unregister_all(struct tsg_pager * pager) {
    for (int32_t i = 0; i < pager->host.n_chunks; i++) {
        unregister(pager, &pager->host.chunks[i]);
    }
}

static void free_copies(struct tsg_pager * pager) {
    for (int32_t i = 0; i < pager->host.n_weights; i++) {
        struct tsg_weight * w = pager->host.weights[i];
        if (w->copy) {
            pager->host.ops->free_pinned(pager, w->copy);
            w->copy = NULL;
        }
    }
}

void tsg_host_close(struct tsg_pager * pager) {
    struct tsg_host * host = &pager->host;
    unregister_all(pager);
    for (int32_t i = 0; i < host->n_chunks; i++) {
        tsg_chunk_unmap(&host->chunks[i]);
    }
    free_copies(pager);
    tsg_unlocked(pager);
    tsg_ring_close(pager);
    for (int32_t i = 0; i < host->n_weights; i++) {
        host->weights[i]->host = NULL;
    }
    for (int32_t i = 0; i < pager->n_pools; i++) {
        pager->pools[i].ring = NULL;
    }
    free(host->weights);
    free(host->chunks);
    host->weights = NULL;
    host->chunks  = NULL;
    host->n_weights = host->n_chunks = 0;
    host->rung                       = TSG_HOST_NONE;
    host->why[0] = host->text[0] = 0;
}

void tsg_host_free(struct tsg_pager * pager) {
    tsg_host_close(pager);
    tsg_files_close(&pager->host);
}

enum tsg_status tsg_pager_set_host_limit(struct tsg_pager * pager, uint64_t bytes) {
    if (pager->host.rung != TSG_HOST_NONE) {
        return tsg_fail(TSG_E_STATE, "the host pool is open: limit it before the pager is ready");
    }
    pager->host.limit = bytes;
    return TSG_OK;
}

// ---- progress ----

struct report {
    bool     (*progress)(float fraction, void * data);
    void *   data;
    uint64_t total;
    uint64_t done;
    float    shown;           // a rung that does not hold does not turn it back
    enum tsg_status status;   // not OK: the caller wants to stop, or the file is broken; no other rung helps
};

// False: stop.
static bool tell(struct report * r, uint64_t bytes) {
    r->done             += bytes;
    const float fraction = r->total ? (float) ((double) r->done / (double) r->total) : 1;
    r->shown             = fraction > r->shown ? fraction : r->shown;
    if (r->status == TSG_OK && r->progress && !r->progress(r->shown, r->data)) {
        r->status = tsg_fail(TSG_E_STOPPED, "loading was stopped");
    }
    return r->status == TSG_OK;
}

static void size_text(char * text, size_t room, uint64_t bytes) {
    const bool large = bytes >= (uint64_t) 1 << 30;
    snprintf(text, room, "%.2f %s", (double) bytes / (large ? 1 << 30 : 1 << 20), large ? "GiB" : "MiB");
}

// Goes on with a text of `room` bytes, as far as it fits.
__attribute__((format(printf, 3, 4))) static void append(char * text, size_t room, const char * format, ...) {
    const size_t n = strlen(text);
    va_list      args;
    va_start(args, format);
    vsnprintf(text + n, room - n, format, args);
    va_end(args);
}

// ---- the rungs ----

// Brings a chunk into memory: at once, and without the signal that touching a page of a file which was cut off would raise.
static bool populate(const struct tsg_host * host, const struct tsg_chunk * chunk, struct report * r) {
    if (madvise(chunk->map, chunk->size, MADV_POPULATE_READ) == 0 || errno != EFAULT) {  // kernels that do not know it: touching does it
        return true;
    }
    r->status = tsg_fail(TSG_E_FILE, "%s: was cut off while it was read, or its disk fails; copy it again", host->paths[host->weights[chunk->first]->shard]);
    return false;
}

static bool register_chunk(struct tsg_pager * pager, struct tsg_chunk * chunk) {
    const struct tsg_pin_ops * ops = pager->host.ops;
    const uint8_t *            end = chunk->map + chunk->size - 1;
    const time_t             start = time(NULL);
    if (!ops->register_range(pager, chunk->map, chunk->size)) {
        return false;
    }
    chunk->registered = true;
    if (ops->device_pointer(pager, chunk->map) != chunk->map || ops->device_pointer(pager, end) != end) {
        tsg_fail(TSG_E_STATE, "the device sees registered memory at another address");
        return false;
    }
    const double seconds = difftime(time(NULL), start);
    if (seconds > SLOW_CHUNK_S) {
        tsg_fail(TSG_E_STATE, "it took %.0f s for %zu MiB", seconds, chunk->size >> 20);
        return false;
    }
    return true;
}

// Mapped. On false nothing is registered.
static bool register_all(struct tsg_pager * pager, struct report * r) {
    struct tsg_host * host = &pager->host;
    if (!host->ops->register_range) {
        append(host->why, sizeof(host->why), "; %s cannot register a mapping", ggml_backend_dev_name(pager->inner));
        return false;
    }
    char at[32];
    for (int32_t i = 0; i < host->n_chunks; i++) {
        if (host->chunks[i].resident) {
            continue;
        }
        const bool ok = populate(host, &host->chunks[i], r) && register_chunk(pager, &host->chunks[i]);
        if (!ok || !tell(r, host->chunks[i].size)) {
            size_text(at, sizeof(at), r->done);
            append(host->why, sizeof(host->why), "; registering failed at %s: %s", at, tsg_last_error());
            unregister_all(pager);
            return false;
        }
    }
    return true;
}

static bool copy_weight(struct tsg_pager * pager, struct tsg_weight * w) {
    const size_t page   = (size_t) sysconf(_SC_PAGESIZE);
    void *       memory = pager->host.ops->alloc_pinned(pager, tsg_weight_bytes(w), &w->copy);
    if (!memory) {
        w->copy = NULL;
        return false;
    }
    memcpy(memory, w->host, tsg_weight_bytes(w));
    // The pages that were read leave, the mapping stays in case that the next weight finds no memory.
    const uintptr_t begin = ((uintptr_t) w->host + page - 1) / page * page, end = ((uintptr_t) w->host + tsg_weight_bytes(w)) / page * page;
    if (begin < end) {
        madvise((void *) begin, end - begin, MADV_DONTNEED);
    }
    w->host = memory;
    return true;
}

// Pinned. On false the weights are in the mapping again.
static bool copy_all(struct tsg_pager * pager, struct report * r) {
    struct tsg_host * host = &pager->host;
    char              at[32];
    r->done = 0;
    for (int32_t c = 0; c < host->n_chunks; c++) {
        struct tsg_chunk * chunk = &host->chunks[c];
        bool               ok    = chunk->resident || populate(host, chunk, r);
        for (int32_t i = chunk->first; i < chunk->first + chunk->n && !chunk->resident && ok; i++) {
            ok = copy_weight(pager, host->weights[i]) && tell(r, tsg_weight_bytes(host->weights[i]));
        }
        if (!ok) {
            size_text(at, sizeof(at), r->done);
            append(host->why, sizeof(host->why), "; page-locked copies failed at %s: %s", at, tsg_last_error());
            free_copies(pager);
            for (int32_t i = 0; i < host->n_chunks; i++) {
                tsg_chunk_point(host, &host->chunks[i]);
            }
            return false;
        }
    }
    for (int32_t c = 0; c < host->n_chunks; c++) {
        if (!host->chunks[c].resident) {
            tsg_chunk_unmap(&host->chunks[c]);
        }
    }
    return true;
}

// Pageable: always holds.
static void open_ring(struct tsg_pager * pager) {
    struct tsg_host * host    = &pager->host;
    size_t            largest = 0;
    for (int32_t i = 0; i < host->n_weights; i++) {
        const struct tsg_weight * w = host->weights[i];
        largest = !pager->pools[w->layer->pool].resident && w->bytes > largest ? w->bytes : largest;
    }
    tsg_ring_open(pager, largest);
    for (int32_t i = 0; i < pager->n_pools && host->ring.n; i++) {
        pager->pools[i].ring = &host->ring;
    }
}

static void climb(struct tsg_pager * pager, struct report * r, uint64_t bytes) {
    struct tsg_host * host = &pager->host;
    char              size[32], room[32], piece[32];
    const uint64_t    available = host->ops && bytes ? tsg_lockable(pager) : 0;
    size_text(size, sizeof(size), bytes);
    if (!host->ops || !bytes) {
        host->rung = TSG_HOST_MAPPED;
        snprintf(host->text, sizeof(host->text),
                 bytes ? "mapped: %s of the file as it is, %s reads them there" : "mapped: nothing is paged, nothing is page-locked",
                 size, ggml_backend_dev_name(pager->inner));
        return;
    }
    if (available < bytes) {
        size_text(room, sizeof(room), available);
        append(host->why, sizeof(host->why), "; of memory %s may be page-locked, and the experts are %s", room, size);
    } else if (register_all(pager, r)) {
        tsg_locked(pager, bytes);
        host->rung = TSG_HOST_MAPPED;
        snprintf(host->text, sizeof(host->text), "mapped: %s registered", size);
        return;
    } else if (r->status != TSG_OK) {
        return;
    } else if (copy_all(pager, r)) {
        tsg_locked(pager, bytes);
        host->rung = TSG_HOST_PINNED;
        snprintf(host->text, sizeof(host->text), "pinned copy of %s%s", size, host->why);
        return;
    } else if (r->status != TSG_OK) {
        return;
    }
    open_ring(pager);
    host->rung = TSG_HOST_PAGEABLE;
    size_text(piece, sizeof(piece), host->ring.size);
    if (host->ring.n) {
        snprintf(host->text, sizeof(host->text), "pageable: %s of the file, through %d page-locked pieces of %s%s", size, host->ring.n, piece, host->why);
    } else {
        snprintf(host->text, sizeof(host->text), "pageable: %s of the file, without any page-locked memory%s", size, host->why);
    }
}

// ---- what stays resident ----

// Registered only while it is read, which is several times faster; where that fails the driver copies as it can.
static bool fill_chunk(struct tsg_pager * pager, struct tsg_chunk * chunk, bool * can_register, struct report * r) {
    struct tsg_host * host = &pager->host;
    if (!populate(host, chunk, r)) {
        return false;
    }
    if (*can_register && !register_chunk(pager, chunk)) {
        unregister(pager, chunk);
        *can_register = false;
        append(host->text, sizeof(host->text), "; read into the slots without registering: %s", tsg_last_error());
    }
    bool ok = true;
    for (int32_t i = chunk->first; i < chunk->first + chunk->n && ok; i++) {
        const struct tsg_weight * w = host->weights[i];
        ggml_backend_tensor_set(pager->pools[w->layer->pool].slot[w->part], w->host, (size_t) w->layer->first * w->bytes, tsg_weight_bytes(w));
        ok = tell(r, tsg_weight_bytes(w));
    }
    unregister(pager, chunk);
    madvise(chunk->map, chunk->size, MADV_DONTNEED);  // they are in memory a second time
    return ok;
}

enum tsg_status tsg_host_open(struct tsg_pager * pager, bool (*progress)(float fraction, void * data), void * data) {
    struct tsg_host * host  = &pager->host;
    struct report     r     = { .progress = progress, .data = data };
    uint64_t          paged = 0;
    tsg_host_close(pager);
    r.status = tsg_host_map(pager);
    for (int32_t i = 0; i < host->n_chunks; i++) {
        r.total += host->chunks[i].size;
        paged   += host->chunks[i].resident ? 0 : host->chunks[i].size;
    }
    if (tell(&r, 0)) {
        climb(pager, &r, paged);
    }
    r.done            = paged;
    bool can_register = host->ops && host->ops->register_range;
    for (int32_t i = 0; i < host->n_chunks && r.status == TSG_OK; i++) {
        if (host->chunks[i].resident) {
            fill_chunk(pager, &host->chunks[i], &can_register, &r);
        }
    }
    r.done = r.total;
    if (!tell(&r, 0)) {
        tsg_host_close(pager);
    }
    return r.status;
}

// ---- what is resident no longer ----

static bool is_new(const struct tsg_pager * pager, const struct tsg_weight * w, const bool * paged) {
    return !w->copy && paged[w->layer->pool] && pager->pools[w->layer->pool].resident;
}

static bool has_new(const struct tsg_pager * pager, const struct tsg_chunk * chunk, const bool * paged) {
    bool any = false;
    for (int32_t i = chunk->first; i < chunk->first + chunk->n && !chunk->registered; i++) {
        any |= is_new(pager, pager->host.weights[i], paged);
    }
    return any;
}

// On false nothing more is registered than before.
static bool register_new(struct tsg_pager * pager, const bool * paged, struct report * r) {
    struct tsg_host * host = &pager->host;
    bool              ok   = host->ops->register_range != NULL;
    int32_t           n    = 0;
    bool *            done = calloc((size_t) host->n_chunks + 1, sizeof(bool));
    if (!ok) {
        tsg_fail(TSG_E_STATE, "%s cannot register a mapping", ggml_backend_dev_name(pager->inner));
    }
    for (; n < host->n_chunks && ok && done; n++) {
        done[n] = has_new(pager, &host->chunks[n], paged);
        ok      = !done[n] || (populate(host, &host->chunks[n], r) && register_chunk(pager, &host->chunks[n]));
    }
    for (int32_t i = 0; i < n && !ok; i++) {
        if (done[i]) {
            unregister(pager, &host->chunks[i]);
        }
    }
    ok = ok && done;
    free(done);
    return ok;
}

// The mapping stays: somebody may hold an address in it. On false no more is copied than before.
static bool copy_new(struct tsg_pager * pager, const bool * paged, struct report * r) {
    struct tsg_host * host = &pager->host;
    bool              ok   = true;
    for (int32_t c = 0; c < host->n_chunks && ok; c++) {
        struct tsg_chunk * chunk = &host->chunks[c];
        ok = !has_new(pager, chunk, paged) || populate(host, chunk, r);
        for (int32_t i = chunk->first; i < chunk->first + chunk->n && ok; i++) {
            struct tsg_weight * w    = host->weights[i];
            const uint8_t *     from = w->host;
            if (!chunk->registered && is_new(pager, w, paged)) {
                ok        = copy_weight(pager, w);
                w->before = ok ? from : NULL;
            }
        }
    }
    for (int32_t i = 0; i < host->n_weights; i++) {
        struct tsg_weight * w = host->weights[i];
        if (w->before && !ok) {
            host->ops->free_pinned(pager, w->copy);
            w->copy = NULL;
            w->host = w->before;
        }
        w->before = NULL;
    }
    return ok;
}

enum tsg_status tsg_host_page(struct tsg_pager * pager, const bool * paged, bool must_lock) {
    struct tsg_host * host  = &pager->host;
    struct report     r     = { .status = TSG_OK };
    uint64_t          bytes = 0;
    bool              idle  = true;  // nothing was paged so far
    char              size[32], room[32];
    for (int32_t i = 0; i < host->n_chunks; i++) {
        bytes += has_new(pager, &host->chunks[i], paged) ? host->chunks[i].size : 0;
    }
    for (int32_t i = 0; i < pager->n_pools; i++) {
        idle &= pager->pools[i].resident;
    }
    if (bytes == 0 || host->rung == TSG_HOST_PAGEABLE) {
        return TSG_OK;
    }
    size_text(size, sizeof(size), bytes);
    if (!host->ops) {
        host->text[0] = idle ? 0 : host->text[0];
        append(host->text, sizeof(host->text), idle ? "mapped: %s of the file as it is, %s reads them there" : "; and %s more, which %s reads there", size,
               ggml_backend_dev_name(pager->inner));
        return TSG_OK;
    }
    host->why[0] = 0;
    const uint64_t available = tsg_lockable(pager);
    if (available < bytes) {
        size_text(room, sizeof(room), available);
        append(host->why, sizeof(host->why), "; of memory %s may be page-locked, and these experts are %s", room, size);
    } else if (register_new(pager, paged, &r)) {
        tsg_locked(pager, bytes);
        host->text[0] = idle ? 0 : host->text[0];
        append(host->text, sizeof(host->text), idle ? "mapped: %s registered" : "; %s more registered", size);
        return TSG_OK;
    } else if (r.status == TSG_OK) {
        append(host->why, sizeof(host->why), "; registering failed: %s", tsg_last_error());
        if (copy_new(pager, paged, &r)) {
            tsg_locked(pager, bytes);
            host->rung    = TSG_HOST_PINNED;
            host->text[0] = idle ? 0 : host->text[0];
            append(host->text, sizeof(host->text), idle ? "pinned copy of %s%s" : "; pinned copy of %s%s", size, host->why);
            return TSG_OK;
        }
        append(host->why, sizeof(host->why), "; page-locked copies failed: %s", tsg_last_error());
    }
    if (r.status != TSG_OK) {
        return r.status;
    }
    if (must_lock) {
        return tsg_fail(TSG_E_MEMORY, "the experts that would leave the device cannot be page-locked, as its engine needs%s: the expert cache stays", host->why);
    }
    host->rung    = TSG_HOST_PAGEABLE;
    host->text[0] = idle ? 0 : host->text[0];
    append(host->text, sizeof(host->text), idle ? "pageable: %s of the file, without any page-locked memory%s" : "; %s of the file pageable%s", size, host->why);
    return TSG_OK;
}
