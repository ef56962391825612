// host.h - the host pool: where all experts lie, and how the device reads them.
//
// The shim maps the GGUF itself, so an expert's bytes are the pages of the file. tsg_pager_ready() climbs down a ladder until a rung holds:
//   mapped    the mapping, registered with the driver: the device reads the file's pages, nothing is copied
//   pinned    page-locked copies, one per weight; the mapping goes
//   pageable  the mapping as it is; misses pass through a ring of page-locked pieces, or, without even those, are copied by the driver as it can
// What the pools hold anyway (tsg_pool.resident) is not on the ladder: it is read once, into its slots.
#pragma once

#include "ggml-abi.h"
#include "tsg.h"

#define TSG_CHUNK_BYTES ((size_t) 512 << 20)  // registered at once
#define TSG_RING_PIECES 8

struct tsg_pager;
struct tsg_weight;

// What page-locking takes. Functions that fail say why in tsg_last_error(). Tests put their own here.
struct tsg_pin_ops {
    bool         (*register_range)(struct tsg_pager * pager, void * base, size_t size);  // NULL: this device cannot
    void         (*unregister_range)(struct tsg_pager * pager, void * base);
    const void * (*device_pointer)(struct tsg_pager * pager, const void * host);  // of registered memory
    void *       (*alloc_pinned)(struct tsg_pager * pager, size_t size, void ** handle);
    void         (*free_pinned)(struct tsg_pager * pager, void * handle);
    uint64_t     (*available)(struct tsg_pager * pager);  // bytes of memory that may be locked
};

// A mapping of a stretch of one file with whole weights in it. Two chunks may share a page of the file, and then each maps it at an address of its own:
// so a weight is never cut, and no copy spans two registrations.
struct tsg_chunk {
    uint8_t * map;
    size_t    size;
    int32_t   first;  // in tsg_host.weights
    int32_t   n;
    bool      resident;    // of pools that hold everything
    bool      registered;
};

// Page-locked pieces through which pageable memory reaches the device while the host goes on.
struct tsg_ring {
    uint8_t *            memory;
    void *               handle;
    size_t               size;  // of a piece
    int32_t              n;     // 0: there is none
    uint64_t             used;  // pieces handed out so far
    ggml_backend_event_t done[TSG_RING_PIECES];  // the piece was read; NULL where the device has no events
};

struct tsg_host {
    const struct tsg_pin_ops * ops;  // NULL: the device is the CPU, which reads the mapping as it is
    int *                 files;     // [n_files] descriptors of the shards
    char **               paths;
    int32_t               n_files;
    struct tsg_weight **  weights;   // [n_weights] of all layers, in the order of the files
    int32_t               n_weights;
    struct tsg_chunk *    chunks;    // [n_chunks]
    int32_t               n_chunks;
    size_t                chunk_bytes;
    uint64_t              limit;     // bytes that the caller lets be page-locked, 0: as many as there are
    struct tsg_ring       ring;
    enum tsg_host_rung    rung;
    uint64_t              locked;    // bytes
    char                  why[384];   // the rungs above do not hold
    char                  text[512];  // the same for people, with the rung taken
};

// map.c
enum tsg_status tsg_host_map(struct tsg_pager * pager);  // every weight in a chunk; TSG_E_FILE if the file is shorter than its header said
void            tsg_chunk_point(const struct tsg_host * host, const struct tsg_chunk * chunk);  // its weights are read from the mapping
void            tsg_chunk_unmap(struct tsg_chunk * chunk);
void            tsg_files_close(struct tsg_host * host);
// The file has these bytes there. Compares both ends only.
bool            tsg_host_has(const struct tsg_pager * pager, const struct tsg_weight * weight, const void * data, size_t offset, size_t size);

// host.c
void            tsg_host_init(struct tsg_pager * pager);
enum tsg_status tsg_host_open(struct tsg_pager * pager, bool (*progress)(float fraction, void * data), void * data);  // again: from the start
// Pools that held everything will page: `paged`[n_pools] says which. Their experts climb down the same ladder, and the addresses that somebody may hold stay
// readable. `must_lock`: the last rung will not do. On failure nothing changed.
enum tsg_status tsg_host_page(struct tsg_pager * pager, const bool * paged, bool must_lock);
void            tsg_host_close(struct tsg_pager * pager);  // nobody copies any more
void            tsg_host_free(struct tsg_pager * pager);

// pin.c
const struct tsg_pin_ops * tsg_pin_ops_of(struct tsg_pager * pager);

// ring.c
void tsg_ring_open(struct tsg_pager * pager, size_t piece);  // as many pieces as can be had, maybe none
void tsg_ring_close(struct tsg_pager * pager);
void tsg_ring_copy(struct tsg_ring * ring, ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
