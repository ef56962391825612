// map.c - the shards of the GGUF in memory.
#define _DEFAULT_SOURCE  // madvise

#include "pager.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// ---- files ----

enum tsg_status tsg_pager_add_file(struct tsg_pager * pager, const char * path) {
    struct tsg_host * host  = &pager->host;
    int *             files = realloc(host->files, sizeof(int) * (size_t) (host->n_files + 1));
    host->files             = files ? files : host->files;
    char ** paths           = realloc(host->paths, sizeof(char *) * (size_t) (host->n_files + 1));
    host->paths             = paths ? paths : host->paths;
    if (!files || !paths) {
        return tsg_fail(TSG_E_MEMORY, "no memory for the name of a file");
    }
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    char *    real = file >= 0 ? realpath(path, NULL) : NULL;  // as /proc/self/maps shows it
    if (!real) {
        const int error = errno;
        if (file >= 0) {
            close(file);
        }
        return tsg_fail(TSG_E_FILE, "%s: cannot be opened: %s", path, strerror(error));
    }
    host->files[host->n_files]   = file;
    host->paths[host->n_files++] = real;
    return TSG_OK;
}

void tsg_files_close(struct tsg_host * host) {
    for (int32_t i = 0; i < host->n_files; i++) {
        close(host->files[i]);
        free(host->paths[i]);
    }
    free(host->files);
    free(host->paths);
}

bool tsg_host_has(const struct tsg_pager * pager, const struct tsg_weight * w, const void * data, size_t offset, size_t size) {
    char         there[64];
    const size_t n = size < sizeof(there) ? size : sizeof(there);
    for (int end = 0; end < 2 && w->shard >= 0 && w->shard < pager->host.n_files; end++) {
        const size_t at = end ? size - n : 0;
        if (pread(pager->host.files[w->shard], there, n, (off_t) (w->offset + offset + at)) != (ssize_t) n || memcmp(there, (const char *) data + at, n) != 0) {
            return false;
        }
    }
    return true;
}

static enum tsg_status check_file(const struct tsg_host * host, const struct tsg_weight * w) {
    struct stat    facts;
    const uint64_t end = w->offset + tsg_weight_bytes(w);
    if (w->shard < 0 || w->shard >= host->n_files) {
        return tsg_fail(TSG_E_ARGUMENT, "%s is in shard %d, and there are %d", w->name, w->shard, host->n_files);
    }
    const char * path = host->paths[w->shard];
    if (fstat(host->files[w->shard], &facts) != 0) {
        return tsg_fail(TSG_E_FILE, "%s: cannot be read: %s", path, strerror(errno));
    }
    if (end < w->offset || end > (uint64_t) facts.st_size) {
        return tsg_fail(TSG_E_FILE, "%s: was cut off while it was read, %s ends at byte %llu of %llu; copy it again", path, w->name,
                        (unsigned long long) end, (unsigned long long) facts.st_size);
    }
    if (w->changed) {
        return tsg_fail(TSG_E_FILE, "%s: %s changed while it was read; load it again", path, w->name);
    }
    return TSG_OK;
}

// ---- chunks ----

static int by_place(const void * a, const void * b) {
    const struct tsg_weight * x = *(struct tsg_weight * const *) a;
    const struct tsg_weight * y = *(struct tsg_weight * const *) b;
    return x->shard != y->shard ? (x->shard > y->shard) - (x->shard < y->shard) : (x->offset > y->offset) - (x->offset < y->offset);
}

static bool is_resident(const struct tsg_pager * pager, const struct tsg_weight * w) {
    return pager->pools[w->layer->pool].resident;
}

// Lists all weights in the order of the files, and checks that they are there.
static enum tsg_status list_weights(struct tsg_pager * pager) {
    struct tsg_host * host = &pager->host;
    host->weights          = malloc(sizeof(struct tsg_weight *) * (size_t) pager->n_layers * TSG_MAX_PARTS);
    host->chunks           = calloc((size_t) pager->n_layers * TSG_MAX_PARTS, sizeof(struct tsg_chunk));
    if (!host->weights || !host->chunks) {
        return tsg_fail(TSG_E_MEMORY, "no memory for the list of %d layers", pager->n_layers);
    }
    for (int32_t l = 0; l < pager->n_layers; l++) {
        for (int32_t p = 0; p < pager->layers[l]->n_parts; p++) {
            struct tsg_weight *   w      = &pager->layers[l]->weight[p];
            const enum tsg_status status = check_file(host, w);
            if (status != TSG_OK) {
                return status;
            }
            host->weights[host->n_weights++] = w;
        }
    }
    qsort(host->weights, (size_t) host->n_weights, sizeof(struct tsg_weight *), by_place);
    return TSG_OK;
}

void tsg_chunk_point(const struct tsg_host * host, const struct tsg_chunk * chunk) {
    const uint64_t first = host->weights[chunk->first]->offset;
    const size_t   skip  = (size_t) (first % (uint64_t) sysconf(_SC_PAGESIZE));
    for (int32_t i = chunk->first; i < chunk->first + chunk->n; i++) {
        host->weights[i]->host = chunk->map + skip + (host->weights[i]->offset - first);
    }
}

// Maps neighbours together, up to chunk_bytes; a weight larger than that has a chunk of its own.
static enum tsg_status map_weights(struct tsg_pager * pager) {
    struct tsg_host * host = &pager->host;
    const uint64_t    page = (uint64_t) sysconf(_SC_PAGESIZE);
    for (int32_t first = 0, next; first < host->n_weights; first = next) {
        const struct tsg_weight * w     = host->weights[first];
        const uint64_t            begin = w->offset / page * page;
        uint64_t                  end   = w->offset + tsg_weight_bytes(w);
        for (next = first + 1; next < host->n_weights; next++) {
            const struct tsg_weight * n = host->weights[next];
            if (n->shard != w->shard || n->offset > end + page || n->offset + tsg_weight_bytes(n) - begin > host->chunk_bytes ||
                is_resident(pager, n) != is_resident(pager, w)) {
                break;
            }
            end = n->offset + tsg_weight_bytes(n) > end ? n->offset + tsg_weight_bytes(n) : end;
        }
        const size_t size = (size_t) ((end - begin + page - 1) / page * page);
        void *       map  = mmap(NULL, size, PROT_READ, MAP_SHARED, host->files[w->shard], (off_t) begin);
        if (map == MAP_FAILED) {
            return tsg_fail(TSG_E_MEMORY, "%s: cannot be mapped: %s", host->paths[w->shard], strerror(errno));
        }
        struct tsg_chunk * chunk = &host->chunks[host->n_chunks++];
        *chunk = (struct tsg_chunk) { .map = map, .size = size, .first = first, .n = next - first, .resident = is_resident(pager, w) };
        tsg_chunk_point(host, chunk);
    }
    return TSG_OK;
}

void tsg_chunk_unmap(struct tsg_chunk * chunk) {
    if (chunk->map) {
        munmap(chunk->map, chunk->size);
        chunk->map = NULL;
    }
}

// The part of a weight that is mapped at [begin, end), from byte `offset` of the file on, leaves the process. It stays in the page cache.
static void drop_weight(const struct tsg_weight * w, uint64_t begin, uint64_t end, uint64_t offset) {
    const uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE), last = offset + (end - begin);
    uint64_t       from = w->offset > offset ? w->offset : offset;
    uint64_t       to   = w->offset + tsg_weight_bytes(w) < last ? w->offset + tsg_weight_bytes(w) : last;
    from                = (from + page - 1) / page * page;
    to                  = to / page * page;
    if (from < to) {
        madvise((void *) (uintptr_t) (begin + (from - offset)), to - from, MADV_DONTNEED);
    }
}

// llama.cpp maps the file too, fills its mapping, and where it computes from parts of it keeps all that lies between them. The experts there count as
// memory of this process a second time.
static void drop_other_mappings(const struct tsg_host * host) {
    FILE * maps = fopen("/proc/self/maps", "r");
    char   line[4352];
    while (maps && fgets(line, sizeof(line), maps)) {
        unsigned long long begin, end, offset;
        char               access[5];
        int                at = 0;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%llx-%llx %4s %llx %*s %*s %n", &begin, &end, access, &offset, &at) != 4 || access[3] != 's' || line[at] != '/') {
            continue;
        }
        for (int32_t i = 0; i < host->n_weights; i++) {
            if (strcmp(host->paths[host->weights[i]->shard], line + at) == 0) {
                drop_weight(host->weights[i], begin, end, offset);
            }
        }
    }
    if (maps) {
        fclose(maps);
    }
}

enum tsg_status tsg_host_map(struct tsg_pager * pager) {
    const enum tsg_status status = list_weights(pager);
    if (status == TSG_OK) {
        drop_other_mappings(&pager->host);
    }
    return status == TSG_OK ? map_weights(pager) : status;
}
