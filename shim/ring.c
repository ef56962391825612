// ring.c - copies from pageable memory through a ring of page-locked pieces: the host fills one piece while the device reads the others.
#include "pager.h"

#include <string.h>

void tsg_ring_open(struct tsg_pager * pager, size_t piece) {
    struct tsg_ring * ring = &pager->host.ring;
    *ring                  = (struct tsg_ring) { .size = piece };
    for (int32_t n = TSG_RING_PIECES; n >= 2 && !ring->memory; n /= 2) {
        ring->memory = pager->host.ops->alloc_pinned(pager, piece * (size_t) n, &ring->handle);
        ring->n      = ring->memory ? n : 0;
    }
    for (int32_t i = 0; i < ring->n; i++) {
        ring->done[i] = ggml_backend_event_new(pager->inner);
    }
}

void tsg_ring_close(struct tsg_pager * pager) {
    struct tsg_ring * ring = &pager->host.ring;
    for (int32_t i = 0; i < ring->n; i++) {
        ggml_backend_event_free(ring->done[i]);
    }
    if (ring->memory) {
        pager->host.ops->free_pinned(pager, ring->handle);
    }
    *ring = (struct tsg_ring) { 0 };
}

void tsg_ring_copy(struct tsg_ring * ring, ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const size_t         i     = (size_t) (ring->used % (uint64_t) ring->n);
    uint8_t *            piece = ring->memory + i * ring->size;
    ggml_backend_event_t done  = ring->done[i];
    GGML_ASSERT(size <= ring->size);
    if (done && ring->used >= (uint64_t) ring->n) {
        ggml_backend_event_synchronize(done);
    }
    ring->used++;
    memcpy(piece, data, size);
    ggml_backend_tensor_set_async(backend, tensor, piece, offset, size);
    if (done) {
        ggml_backend_event_record(done, backend);
    } else {
        ggml_backend_synchronize(backend);
    }
}
