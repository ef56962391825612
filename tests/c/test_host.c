// test_host.c - the host pool: every rung of its ladder with an allocator that fails at a chosen byte, broken files, stopping, and what is left behind.
#include "rig.h"

#include <stdint.h>

static const struct spec small = { .type = GGML_TYPE_Q8_0, .tables = true, .n_layers = 4, .n_expert = { 8, 4, 8, 4 }, .n_used = 2, .n_slots = 6, .pools = true };

// ---- a device that page-locks, as the driver would ----

static struct {
    size_t   register_limit;  // bytes
    size_t   pinned_limit;
    uint64_t available;
    bool     elsewhere;  // registered memory has another address on the device
    size_t   registered, most_registered, n_registered;
    size_t   pinned, n_pinned;
    struct {
        uint8_t * base;
        size_t    size;
    } range[64];  // registered now
} fake;

struct fake_memory {
    size_t  size;
    uint8_t bytes[];
};

static bool fake_register(struct tsg_pager * pager, void * base, size_t size) {
    (void) pager;
    CHECK((uintptr_t) base % 4096 == 0 && size % 4096 == 0 && fake.n_registered < 64);
    for (size_t i = 0; i < fake.n_registered; i++) {  // the driver refuses what overlaps
        CHECK((uint8_t *) base >= fake.range[i].base + fake.range[i].size || (uint8_t *) base + size <= fake.range[i].base);
    }
    if (fake.registered + size > fake.register_limit) {
        tsg_fail(TSG_E_STATE, "no range today");
        return false;
    }
    fake.range[fake.n_registered].base   = base;
    fake.range[fake.n_registered++].size = size;
    fake.registered      += size;
    fake.most_registered  = fake.registered > fake.most_registered ? fake.registered : fake.most_registered;
    return true;
}

static void fake_unregister(struct tsg_pager * pager, void * base) {
    (void) pager;
    size_t i = 0;
    while (i < fake.n_registered && fake.range[i].base != base) {
        i++;
    }
    CHECK(i < fake.n_registered);
    volatile uint8_t touch = fake.range[i].base[0];  // still mapped
    (void) touch;
    fake.registered -= fake.range[i].size;
    fake.range[i]    = fake.range[--fake.n_registered];
}

static const void * fake_pointer(struct tsg_pager * pager, const void * host) {
    (void) pager;
    return fake.elsewhere ? (const uint8_t *) host + 4096 : host;
}

static void * fake_alloc(struct tsg_pager * pager, size_t size, void ** handle) {
    (void) pager;
    struct fake_memory * memory = fake.pinned + size <= fake.pinned_limit ? malloc(sizeof(struct fake_memory) + size) : NULL;
    if (!memory) {
        tsg_fail(TSG_E_MEMORY, "no page today");
        return NULL;
    }
    memory->size  = size;
    fake.pinned  += size;
    fake.n_pinned++;
    *handle = memory;
    return memory->bytes;
}

static void fake_free(struct tsg_pager * pager, void * handle) {
    (void) pager;
    fake.pinned -= ((struct fake_memory *) handle)->size;
    fake.n_pinned--;
    free(handle);
}

static uint64_t fake_available(struct tsg_pager * pager) {
    (void) pager;
    return fake.available;
}

static const struct tsg_pin_ops fake_ops = { fake_register, fake_unregister, fake_pointer, fake_alloc, fake_free, fake_available };

// ---- rigs ----

static struct rig offered(const struct spec * spec, size_t chunk_bytes) {
    struct rig rig               = rig_new(spec);
    rig.pager->host.ops         = &fake_ops;
    rig.pager->host.chunk_bytes = chunk_bytes;
    fake.available              = UINT64_MAX;
    rig_offer(&rig);
    return rig;
}

static bool rung_is(struct rig * rig, enum tsg_host_rung rung, const char * text) {
    if (rig_stats(rig).host_rung != rung || !strstr(tsg_pager_host(rig->pager), text)) {
        fprintf(stderr, "rung %d: %s\n", (int) rig_stats(rig).host_rung, tsg_pager_host(rig->pager));
        return false;
    }
    return true;
}

// Everything computes as on the plain side, with the right bytes in all slots.
static void works(struct rig * rig) {
    for (uint64_t seed = 1; seed < 6; seed++) {
        rig_compare_random(rig, rig->paged.backend, seed % 2 ? 3 : 40, seed);
    }
    for (int32_t l = 0; l < rig->spec.n_layers; l++) {
        for (int32_t p = 0; p < rig_n_parts(&rig->spec); p++) {
            const struct tsg_weight * w = &rig->pager->layers[l]->weight[p];
            CHECK(memcmp(w->host, rig->plain.weight[l][p]->data, tsg_weight_bytes(w)) == 0);
        }
    }
}

static void nothing_is_left(void) {
    CHECK(fake.n_registered == 0 && fake.registered == 0 && fake.n_pinned == 0 && fake.pinned == 0);
}

static void close_clean(struct rig * rig) {
    rig_close(rig);
    nothing_is_left();
}

static uint64_t expert_bytes(const struct rig * rig, bool resident) {
    uint64_t bytes = 0;
    for (int32_t l = 0; l < rig->spec.n_layers; l++) {
        for (int32_t p = 0; p < rig_n_parts(&rig->spec); p++) {
            bytes += rig->pager->pools[rig->pager->layers[l]->pool].resident == resident ? tsg_weight_bytes(&rig->pager->layers[l]->weight[p]) : 0;
        }
    }
    return bytes;
}

// ---- rungs ----

static void on_the_cpu_the_mapping_is_enough(void) {
    struct rig rig = rig_open(&small);
    CHECK(rung_is(&rig, TSG_HOST_MAPPED, "mapped: 0.") && strstr(tsg_pager_host(rig.pager), "CPU reads them there"));
    works(&rig);
    rig_close(&rig);
}

static void nothing_before_ready(void) {
    fake.register_limit = SIZE_MAX;
    struct rig rig = offered(&small, TSG_CHUNK_BYTES);
    CHECK(rung_is(&rig, TSG_HOST_NONE, "") && strlen(tsg_pager_host(rig.pager)) == 0);
    uint8_t bytes[100] = { 1 };
    ggml_backend_tensor_get(rig.paged.weight[0][0], bytes, 0, 100);
    CHECK(bytes[0] == 0);
    nothing_is_left();
    close_clean(&rig);
}

static void registered(void) {
    fake.register_limit = SIZE_MAX;
    const size_t sizes[] = { 1, 5000, 10000, 40000, TSG_CHUNK_BYTES };
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct rig rig = offered(&small, sizes[i]);
        CHECK(rig_ready(rig.pager) == TSG_OK && rung_is(&rig, TSG_HOST_MAPPED, " registered") && fake.n_pinned == 0);
        CHECK(fake.registered >= expert_bytes(&rig, false));
        works(&rig);
        CHECK(rig_ready(rig.pager) == TSG_OK && fake.n_registered == (size_t) rig.pager->host.n_chunks);  // once is enough
        close_clean(&rig);
    }
}

// What one copy may touch, a whole weight, lies in one registration, and a page of the file may be in two.
static void no_weight_is_cut(void) {
    fake.register_limit = SIZE_MAX;
    struct rig rig = offered(&small, 40000);
    CHECK(rig_ready(rig.pager) == TSG_OK);
    const struct tsg_host * host   = &rig.pager->host;
    int                     shared = 0;
    CHECK(host->n_chunks > 2 && host->n_chunks < host->n_weights);
    for (int32_t i = 0, n = 0; i < host->n_weights; i++) {
        int found = 0;
        for (size_t r = 0; r < fake.n_registered; r++) {
            const uint8_t * end = fake.range[r].base + fake.range[r].size;
            found += host->weights[i]->host >= fake.range[r].base && host->weights[i]->host + tsg_weight_bytes(host->weights[i]) <= end;
        }
        CHECK(found == 1);
        n = i == host->chunks[n].first + host->chunks[n].n ? n + 1 : n;
        if (i > 0 && i == host->chunks[n].first && host->weights[i - 1]->shard == host->weights[i]->shard) {
            shared += (host->weights[i]->offset - 32) / 4096 == host->weights[i]->offset / 4096;
            CHECK(host->weights[i]->offset - host->weights[host->chunks[n - 1].first]->offset + tsg_weight_bytes(host->weights[i]) > 40000);
        }
    }
    CHECK(shared > 0);
    close_clean(&rig);
}

static size_t bytes_in_all(void) {
    struct rig   whole = offered(&small, 10000);
    const size_t total = expert_bytes(&whole, false);
    close_clean(&whole);
    return total;
}

static void registering_fails_at_any_byte(void) {
    fake.pinned_limit = SIZE_MAX;
    fake.register_limit = 0;
    const size_t total = bytes_in_all();
    for (size_t limit = 0; limit < total; limit += total / 7) {
        fake.register_limit  = limit;
        fake.most_registered = 0;
        struct rig rig       = offered(&small, 10000);
        CHECK(rig_ready(rig.pager) == TSG_OK && rung_is(&rig, TSG_HOST_PINNED, "pinned copy of 0."));
        CHECK(strstr(tsg_pager_host(rig.pager), "registering failed at 0.") && strstr(tsg_pager_host(rig.pager), "no range today"));
        CHECK(fake.n_registered == 0 && fake.pinned == total && fake.most_registered <= limit && (limit < total / 2 || fake.most_registered > 0));
        for (int32_t i = 0; i < rig.pager->host.n_chunks; i++) {
            CHECK(!rig.pager->host.chunks[i].map);  // the mapping is gone
        }
        works(&rig);
        close_clean(&rig);
    }
}

static void copies_fail_at_any_byte(void) {
    fake.register_limit = 0;
    fake.pinned_limit   = 0;
    const size_t total = bytes_in_all();
    for (size_t limit = 0; limit < total; limit += total / 7) {
        fake.pinned_limit = limit;
        struct rig rig    = offered(&small, 10000);
        CHECK(rig_ready(rig.pager) == TSG_OK && rung_is(&rig, TSG_HOST_PAGEABLE, "pageable: "));
        CHECK(strstr(tsg_pager_host(rig.pager), "no range today") && strstr(tsg_pager_host(rig.pager), "page-locked copies failed at 0."));
        CHECK(strstr(tsg_pager_host(rig.pager), limit ? "through 8 page-locked pieces" : "without any page-locked memory"));
        CHECK(fake.n_registered == 0 && fake.n_pinned == (limit > 0) && (rig.pager->pools[0].ring != NULL) == (limit > 0));
        works(&rig);
        CHECK(!limit || rig.pager->host.ring.used > 2 * TSG_RING_PIECES);
        close_clean(&rig);
    }
}

static void a_smaller_ring(void) {
    fake.register_limit = 0;
    struct rig   whole = offered(&small, 10000);
    const size_t piece = whole.pager->layers[0]->weight[0].bytes;
    close_clean(&whole);
    for (int32_t n = 8; n >= 1; n /= 2) {
        fake.pinned_limit = piece * (size_t) n;
        struct rig rig    = offered(&small, 10000);
        CHECK(rig_ready(rig.pager) == TSG_OK && rung_is(&rig, TSG_HOST_PAGEABLE, "pageable: ") && rig.pager->host.ring.n == (n >= 2 ? n : 0));
        works(&rig);
        close_clean(&rig);
    }
}

static void memory_at_another_address(void) {
    fake.register_limit = fake.pinned_limit = SIZE_MAX;
    fake.elsewhere      = true;
    struct rig rig      = offered(&small, 10000);
    CHECK(rig_ready(rig.pager) == TSG_OK && rung_is(&rig, TSG_HOST_PINNED, "another address") && fake.n_registered == 0);
    works(&rig);
    close_clean(&rig);
}

static void a_device_that_cannot_register(void) {
    static const struct tsg_pin_ops ops = { .alloc_pinned = fake_alloc, .free_pinned = fake_free, .available = fake_available };
    for (int resident = 0; resident < 2; resident++) {
        struct spec spec    = small;
        spec.n_slots        = resident ? 100 : 6;
        fake.pinned_limit   = SIZE_MAX;
        struct rig rig      = offered(&spec, 10000);
        rig.pager->host.ops = &ops;
        CHECK(rig_ready(rig.pager) == TSG_OK && rung_is(&rig, resident ? TSG_HOST_MAPPED : TSG_HOST_PINNED, resident ? "nothing is paged" : "cannot register"));
        works(&rig);
        close_clean(&rig);
    }
}

static void more_experts_than_memory(void) {  // locking them would kill the process, or another
    fake.register_limit = fake.pinned_limit = SIZE_MAX;
    struct rig rig      = offered(&small, 10000);
    fake.available      = expert_bytes(&rig, false) / 2;
    CHECK(rig_ready(rig.pager) == TSG_OK && rung_is(&rig, TSG_HOST_PAGEABLE, "may be page-locked, and the experts are") && rig.pager->host.ring.n == 8);
    works(&rig);
    close_clean(&rig);
}

static void more_experts_than_the_caller_lets_be_locked(void) {
    fake.register_limit = fake.pinned_limit = SIZE_MAX;
    for (int fits = 0; fits < 2; fits++) {
        struct rig rig = offered(&small, 10000);
        CHECK(tsg_pager_set_host_limit(rig.pager, fits ? 2 * expert_bytes(&rig, false) : expert_bytes(&rig, false) / 2) == TSG_OK);
        CHECK(rig_ready(rig.pager) == TSG_OK);
        CHECK(fits ? rung_is(&rig, TSG_HOST_MAPPED, "registered") : rung_is(&rig, TSG_HOST_PAGEABLE, "may be page-locked, and the experts are"));
        CHECK(tsg_pager_set_host_limit(rig.pager, 0) == TSG_E_STATE);
        works(&rig);
        close_clean(&rig);
    }
}

// ---- pools that hold everything ----

static void what_is_resident_is_registered_while_it_is_read(void) {
    for (int fails = 0; fails < 2; fails++) {
        struct spec spec     = small;
        spec.n_slots         = 100;
        fake.register_limit  = fails ? 0 : SIZE_MAX;
        fake.most_registered = 0;
        struct rig rig       = offered(&spec, 10000);
        CHECK(rig_ready(rig.pager) == TSG_OK && rung_is(&rig, TSG_HOST_MAPPED, "nothing is paged") && fake.n_registered == 0 && fake.n_pinned == 0);
        CHECK(fails ? fake.most_registered == 0 : fake.most_registered > 0 && fake.most_registered < expert_bytes(&rig, true) / 2);
        CHECK((strstr(tsg_pager_host(rig.pager), "without registering: no range today") != NULL) == fails);
        works(&rig);
        close_clean(&rig);
    }
}

static void one_pool_of_two(void) {
    for (int rung = TSG_HOST_MAPPED; rung <= TSG_HOST_PAGEABLE; rung++) {
        struct spec spec    = small;
        spec.n_slots        = 10;  // the odd layers have 8 experts together
        fake.register_limit = rung == TSG_HOST_MAPPED ? SIZE_MAX : 0;
        fake.pinned_limit   = rung == TSG_HOST_PINNED ? SIZE_MAX : 0;
        struct rig rig      = offered(&spec, TSG_CHUNK_BYTES);
        CHECK(rig_ready(rig.pager) == TSG_OK && rung_is(&rig, (enum tsg_host_rung) rung, "") && rig.pager->pools[1].resident && !rig.pager->pools[0].resident);
        CHECK(rung != TSG_HOST_PINNED || fake.pinned == expert_bytes(&rig, false));
        CHECK(fake.n_registered == (rung == TSG_HOST_MAPPED) && !rig.pager->pools[1].ring);
        works(&rig);
        close_clean(&rig);
    }
}

// ---- pools that do so no longer ----

static enum tsg_status shrink(struct rig * rig, int64_t n_slots) {
    struct tsg_resized out;
    const int64_t      slots[2] = { n_slots, n_slots };
    return tsg_pager_resize(rig->pager, slots, &out);
}

// From everything resident, or from one pool of two, to a few slots. Whoever holds an address of an expert may go on reading there.
static void what_becomes_paged_takes_the_ladder(void) {
    for (int rung = TSG_HOST_MAPPED; rung <= TSG_HOST_PAGEABLE; rung++) {
        for (int64_t n_slots = 10; n_slots <= 100; n_slots += 90) {
            struct spec spec    = small;
            spec.n_slots        = n_slots;
            fake.register_limit = rung == TSG_HOST_MAPPED ? SIZE_MAX : 0;
            fake.pinned_limit   = rung == TSG_HOST_PINNED ? SIZE_MAX : 0;
            struct rig   rig    = offered(&spec, 10000);
            const void * host;
            size_t       size;
            CHECK(rig_ready(rig.pager) == TSG_OK && rig.pager->pools[1].resident);
            CHECK(tsg_expert_host(rig.pager, 1, 2, 0, &host, &size) == TSG_OK);
            const void * stays = host;
            CHECK(shrink(&rig, 6) == TSG_OK && rung_is(&rig, (enum tsg_host_rung) rung, "") && !rig.pager->pools[1].resident);
            const char * const texts[] = { "", "registered", "pinned copy of", "pageable" };
            CHECK(strstr(tsg_pager_host(rig.pager), texts[rung]) && !strstr(tsg_pager_host(rig.pager), "nothing is paged"));
            CHECK(tsg_expert_host(rig.pager, 1, 2, 0, &host, &size) == TSG_OK && memcmp(stays, host, size) == 0);
            CHECK(rung != TSG_HOST_PINNED || fake.pinned == expert_bytes(&rig, false));
            CHECK(fake.n_registered == (rung == TSG_HOST_MAPPED ? (size_t) rig.pager->host.n_chunks : 0));
            works(&rig);
            // and back, and again: nothing more is locked
            const size_t locked = fake.registered + fake.pinned;
            CHECK(shrink(&rig, 100) == TSG_OK && rig_stats(&rig).all_resident);
            works(&rig);
            CHECK(shrink(&rig, 6) == TSG_OK && fake.registered + fake.pinned == locked);
            works(&rig);
            close_clean(&rig);
        }
    }
}

// The ring is as large as the largest weight that was paged when it was made: whoever does not fit goes without.
static void a_ring_too_small(void) {
    struct spec spec    = small;
    spec.n_slots        = 10;
    fake.register_limit = 0;
    fake.pinned_limit   = 50000;
    struct rig rig      = offered(&spec, 10000);
    CHECK(rig_ready(rig.pager) == TSG_OK && rung_is(&rig, TSG_HOST_PAGEABLE, "through 8"));
    rig.pager->host.ring.size--;
    CHECK(shrink(&rig, 6) == TSG_OK && !rig.pager->pools[1].ring && !rig.pager->pools[0].ring);
    works(&rig);
    rig.pager->host.ring.size++;
    CHECK(shrink(&rig, 5) == TSG_OK && rig.pager->pools[1].ring && rig.pager->pools[0].ring);
    works(&rig);
    close_clean(&rig);
}

static void an_engine_that_needs_locked_memory_stays_as_it_is(void) {
    for (size_t limit = 0; limit < 60000; limit += 20000) {
        struct spec spec    = small;
        spec.n_slots        = 100;
        fake.register_limit = limit;
        fake.pinned_limit   = limit;
        struct rig rig      = offered(&spec, 10000);
        CHECK(rig_ready(rig.pager) == TSG_OK);
        rig.pager->engine = TSG_ENGINE_DEVICE;
        CHECK(rig_failed(shrink(&rig, 6), TSG_E_MEMORY, "cannot be page-locked") && strstr(tsg_last_error(), "no range today"));
        CHECK(strstr(tsg_last_error(), "no page today") && strstr(tsg_last_error(), "the expert cache stays"));
        nothing_is_left();
        fake.available = 1000;
        CHECK(rig_failed(shrink(&rig, 6), TSG_E_MEMORY, "may be page-locked, and these experts are"));
        CHECK(rung_is(&rig, TSG_HOST_MAPPED, "nothing is paged") && rig_stats(&rig).all_resident);
        works(&rig);
        close_clean(&rig);
    }
}

static void a_file_cut_off_before_it_shrinks(void) {
    struct spec spec    = small;
    spec.n_slots        = 100;
    fake.register_limit = SIZE_MAX;
    struct rig rig      = offered(&spec, 10000);
    CHECK(rig_ready(rig.pager) == TSG_OK && ftruncate(rig.file[1], 4096) == 0);
    CHECK(rig_failed(shrink(&rig, 6), TSG_E_FILE, "was cut off while it was read") && rig_stats(&rig).all_resident);
    close_clean(&rig);
}

// ---- files ----

static void a_file_that_is_not_there(void) {
    struct tsg_pager * pager = rig_pager(TSG_POLICY_LFRU);
    CHECK(rig_failed(tsg_pager_add_file(pager, "/nowhere/model.gguf"), TSG_E_FILE, "/nowhere/model.gguf: cannot be opened: No such file"));
    tsg_pager_free(pager);
}

static void a_shard_that_was_not_added(void) {
    struct rig rig = offered(&small, TSG_CHUNK_BYTES);
    for (int32_t shard = -1; shard <= 2; shard += 3) {
        rig.pager->layers[2]->weight[1].shard = shard;
        CHECK(rig_failed(rig_ready(rig.pager), TSG_E_ARGUMENT, shard < 0 ? "shard -1, and there are 2" : "shard 2, and there are 2"));
    }
    close_clean(&rig);
}

static void a_file_cut_off_after_its_header_was_read(void) {
    fake.register_limit = SIZE_MAX;
    for (int64_t n_slots = 6; n_slots <= 100; n_slots += 94) {
        struct spec spec = small;
        spec.n_slots     = n_slots;
        struct rig  rig  = offered(&spec, 10000);
        const off_t end  = lseek(rig.file[1], 0, SEEK_END);
        CHECK(ftruncate(rig.file[1], end - 1) == 0);
        CHECK(rig_failed(rig_ready(rig.pager), TSG_E_FILE, "was cut off while it was read, blk.3.ffn_down_exps.weight ends at byte "));
        CHECK(rung_is(&rig, TSG_HOST_NONE, "") && tsg_expert_prefetch(rig.pager, 0, 0) == TSG_E_STATE);
        nothing_is_left();
        close_clean(&rig);
    }
}

static void an_offset_beyond_everything(void) {
    struct rig rig = offered(&small, TSG_CHUNK_BYTES);
    rig.pager->layers[0]->weight[0].offset = UINT64_MAX - 100;
    CHECK(rig_failed(rig_ready(rig.pager), TSG_E_FILE, "cut off"));
    close_clean(&rig);
}

static void a_file_that_changed_meanwhile(void) {
    struct rig rig = rig_new(&small);
    CHECK(pwrite(rig.file[0], "new", 3, (off_t) rig.pager->layers[2]->weight[1].offset) == 3);
    rig_offer(&rig);
    CHECK(rig_failed(rig_ready(rig.pager), TSG_E_FILE, "blk.2.ffn_up_exps.weight changed while it was read"));
    rig_close(&rig);
}

// ---- progress ----

struct seen {
    int   n;
    int   stop_at;
    float last;
};

static bool see(float fraction, void * data) {
    struct seen * seen = data;
    CHECK(fraction >= seen->last && fraction <= 1);
    seen->last = fraction;
    return seen->n++ != seen->stop_at;
}

static void stopping_at_any_time(void) {
    // mapped; pinned; pageable; all resident
    const size_t limits[][2] = { { SIZE_MAX, 0 }, { 20000, SIZE_MAX }, { 20000, 20000 }, { SIZE_MAX, 0 } };
    for (int i = 0; i < 4; i++) {
        int steps = 1;
        for (int stop_at = 0; stop_at < steps; stop_at++) {
            struct spec spec    = small;
            spec.n_slots        = i == 3 ? 100 : 10;
            fake.register_limit = limits[i][0];
            fake.pinned_limit   = limits[i][1];
            struct rig  rig     = offered(&spec, 10000);
            struct seen seen    = { .stop_at = stop_at };
            CHECK(rig_failed(tsg_pager_ready(rig.pager, see, &seen), TSG_E_STOPPED, "loading was stopped") && seen.n == stop_at + 1);
            CHECK(rung_is(&rig, TSG_HOST_NONE, "") && tsg_expert_prefetch(rig.pager, 0, 0) == TSG_E_STATE);
            nothing_is_left();
            seen = (struct seen) { .stop_at = -1 };
            CHECK(tsg_pager_ready(rig.pager, see, &seen) == TSG_OK && seen.last == 1);
            steps = seen.n;
            works(&rig);
            close_clean(&rig);
        }
        CHECK(steps > 4);
    }
}

int main(int argc, char ** argv) {
    const struct test tests[] = {
        TEST(on_the_cpu_the_mapping_is_enough),
        TEST(nothing_before_ready),
        TEST(registered),
        TEST(no_weight_is_cut),
        TEST(registering_fails_at_any_byte),
        TEST(copies_fail_at_any_byte),
        TEST(a_smaller_ring),
        TEST(memory_at_another_address),
        TEST(a_device_that_cannot_register),
        TEST(more_experts_than_memory),
        TEST(more_experts_than_the_caller_lets_be_locked),
        TEST(what_is_resident_is_registered_while_it_is_read),
        TEST(one_pool_of_two),
        TEST(what_becomes_paged_takes_the_ladder),
        TEST(a_ring_too_small),
        TEST(an_engine_that_needs_locked_memory_stays_as_it_is),
        TEST(a_file_cut_off_before_it_shrinks),
        TEST(a_file_that_is_not_there),
        TEST(a_shard_that_was_not_added),
        TEST(a_file_cut_off_after_its_header_was_read),
        TEST(an_offset_beyond_everything),
        TEST(a_file_that_changed_meanwhile),
        TEST(stopping_at_any_time),
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
