// copy.cuh - copies by all threads of a grid, for resident.cu.
//
// A kernel reads mapped host memory at 93 % of what a copy engine reaches (51.3 of 55.3 GB/s over PCIe 5), whatever the loads look like: wider hints and bulk
// copies change nothing. Few blocks suffice, and more would only stand in the way of the kernels beside them.
#pragma once

#include "resident.h"

#define CHUNK_READS 4  // 16-byte reads of a thread in a chunk
#define CHUNK_BYTES (16 * CHUNK_READS * TSG_STEP_THREADS)

// One piece of memory cut into chunks; a block takes every gridDim.x-th.
struct chunk {
    char *       to;
    const char * from;
    uint64_t     bytes;
};

template <typename T> static __device__ void copy_words(const chunk & c) {
    const T * __restrict__ src = (const T *) c.from;
    T * __restrict__ dst       = (T *) c.to;
    for (uint64_t i = threadIdx.x; i < c.bytes / sizeof(T); i += TSG_STEP_THREADS) {
        dst[i] = src[i];
    }
}

static __device__ bool is_whole(const chunk & c) {
    return c.bytes == CHUNK_BYTES && ((uint64_t) c.to | (uint64_t) c.from) % 16 == 0;
}

// The end of a piece, or one without alignment.
static __device__ void copy_odd(const chunk & c) {
    const uint64_t bits = (uint64_t) c.to | (uint64_t) c.from | c.bytes;
    if (bits % 16 == 0) {
        copy_words<uint4>(c);
    } else if (bits % 4 == 0) {
        copy_words<uint32_t>(c);
    } else {
        copy_words<uint8_t>(c);
    }
}

// Copies what `next` hands out until it returns false. A chunk is written when the reads of the one after it are on their way: the link is never idle.
// `all_asked` is called when the last reads are on their way.
template <typename F, typename G> static __device__ void copy_chunks(F next, G all_asked) {
    uint4 held[CHUNK_READS];
    char * to = NULL;  // where they belong
    chunk c;
    while (next(c)) {
        uint4 fresh[CHUNK_READS];
        if (is_whole(c)) {
#pragma unroll
            for (int32_t r = 0; r < CHUNK_READS; r++) {
                fresh[r] = ((const uint4 *) c.from)[r * TSG_STEP_THREADS + threadIdx.x];
            }
        } else {
            copy_odd(c);
        }
        if (to) {
#pragma unroll
            for (int32_t r = 0; r < CHUNK_READS; r++) {
                ((uint4 *) to)[r * TSG_STEP_THREADS + threadIdx.x] = held[r];
            }
        }
        to = is_whole(c) ? c.to : NULL;
#pragma unroll
        for (int32_t r = 0; r < CHUNK_READS; r++) {
            held[r] = fresh[r];
        }
    }
    all_asked();
    if (to) {
#pragma unroll
        for (int32_t r = 0; r < CHUNK_READS; r++) {
            ((uint4 *) to)[r * TSG_STEP_THREADS + threadIdx.x] = held[r];
        }
    }
}

// Hands out a block's chunks of a piece, the first being `at`.
static __device__ bool cut(chunk & c, char * to, const char * from, uint64_t size, uint64_t at) {
    const uint64_t start = at * CHUNK_BYTES;
    if (start >= size) {
        return false;
    }
    c = { to + start, from + start, size - start < CHUNK_BYTES ? size - start : CHUNK_BYTES };
    return true;
}

static __device__ uint64_t nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Copies banks [bank, end) of the missing experts, piece after piece without a gap, and no faster than a byte in `ps_per_byte`. `all_asked` is called when the
// link has nothing left to be asked for.
template <typename G>
static __device__ void gather(uint64_t ps_per_byte, const tsg_dev_load * loads, int32_t n_loads, const tsg_dev_layer & layer, int32_t bank, int32_t end, G all_asked) {
    if (n_loads == 0 || bank == end) {
        return;
    }
    const uint64_t start = ps_per_byte ? nanoseconds() : 0;
    int32_t  m = 0, b = bank;
    uint64_t bytes = 0;
    uint64_t at    = blockIdx.x;  // in the piece (m, b)
    copy_chunks(
        [&](chunk & c) {
            while (m < n_loads) {
                const tsg_bank & piece = layer.bank[b];
                if (cut(c, piece.slots + loads[m].slot * piece.bytes, piece.host + loads[m].expert * piece.bytes, piece.bytes, at)) {
                    at += gridDim.x;
                    return true;
                }
                at -= (piece.bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
                bytes += piece.bytes;
                if (++b == end) {
                    b = bank;
                    m++;
                }
            }
            return false;
        },
        [&] {
            while (ps_per_byte && nanoseconds() - start < bytes * ps_per_byte / 1000) {
            }
            all_asked();
        });
}
