// test_counters.c - what the engine counts, which experts it leaves in slots, and what lies in memory that it has not filled.
#include "rig.h"

enum { SLOT_TOKENS = 32 };  // CPU_SLOT_TOKENS in engine.c: from one more on a layer goes through the stage

static const struct spec small = { .type = GGML_TYPE_F32, .n_layers = 2, .n_expert = { 8, 8 }, .n_used = 2, .n_slots = 8 };

static uint64_t n_distinct(const struct spec * spec, const struct batch * batch) {
    uint64_t n = 0;
    for (int32_t l = 0; l < spec->n_layers; l++) {
        bool seen[TSG_MAX_EXPERTS] = { false };
        for (int32_t t = 0; t < batch->n_tokens; t++) {
            for (int32_t i = 0; i < spec->n_used; i++) {
                seen[batch->order[l][t * spec->n_expert[l] + i]] = true;
            }
        }
        for (int32_t e = 0; e < spec->n_expert[l]; e++) {
            n += seen[e];
        }
    }
    return n;
}

static uint64_t expert_bytes(const struct spec * spec) {
    uint64_t bytes = 0;
    for (int32_t p = 0; p < rig_n_parts(spec); p++) {
        bytes += ggml_row_size(spec->type, rig_ne0(spec, p)) * (uint64_t) rig_ne1(spec, p);
        bytes += spec->tables ? (uint64_t) rig_ne1(spec, p) * sizeof(float) + sizeof(float) : 0;
    }
    return bytes;
}

static void counters_of_decode(void) {
    struct spec spec = small;
    spec.type        = GGML_TYPE_Q8_0;
    spec.tables      = true;
    struct rig rig   = rig_open(&spec);
    uint64_t   want  = 0;
    for (int32_t n_tokens = 1; n_tokens <= TSG_DECODE_TOKENS; n_tokens++) {
        // with 4 of 8 experts a layer in use at most, everything goes through slots
        struct batch * batch = batch_random(&spec, n_tokens < 3 ? n_tokens : 2, (uint64_t) n_tokens);
        want += n_distinct(&spec, batch);
        rig_compare(&rig, batch);
        free(batch);
    }
    const struct tsg_stats  stats = rig_stats(&rig);
    const struct tsg_counts c     = stats.phase[TSG_DECODE];
    CHECK(c.graphs == 8 && c.lookups == want && c.hits + c.misses == want && c.hits > 0 && c.streamed == 0 && c.bytes_device == 0);
    CHECK(c.bytes_link == c.misses * expert_bytes(&spec) && c.evictions == c.misses - (uint64_t) stats.slots_used);
    CHECK(stats.phase[TSG_PREFILL].lookups == 0 && stats.phase[TSG_PREFILL].graphs == 0);
    CHECK(stats.slots_total == 8 && stats.slots_used == 8 && !stats.all_resident && stats.host_tensors == 6);
    uint64_t hits = 0, misses = 0;
    for (int32_t l = 0; l < 2; l++) {
        struct tsg_expert experts[8];
        CHECK(tsg_expert_get_layer(rig.pager, l, experts) == TSG_OK);
        for (int32_t e = 0; e < 8; e++) {
            hits   += experts[e].hits;
            misses += experts[e].misses;
        }
    }
    CHECK(hits == c.hits && misses == c.misses);
    tsg_pager_reset_stats(rig.pager);
    CHECK(rig_stats(&rig).phase[TSG_DECODE].lookups == 0 && rig_stats(&rig).slots_used == 8);
    rig_close(&rig);
}

static void from_decode_to_prefill(void) {
    struct rig rig = rig_open(&small);
    rig_compare_random(&rig, rig.paged.backend, TSG_DECODE_TOKENS, 1);
    CHECK(rig_stats(&rig).phase[TSG_DECODE].graphs == 1 && rig_stats(&rig).phase[TSG_PREFILL].graphs == 0);
    rig_compare_random(&rig, rig.paged.backend, TSG_DECODE_TOKENS + 1, 2);
    CHECK(rig_stats(&rig).phase[TSG_DECODE].graphs == 1 && rig_stats(&rig).phase[TSG_PREFILL].graphs == 1);
    // A prompt stays one where its last layer sees a single token.
    struct batch * batch = batch_random(&small, 20, 3);
    batch->n_out         = 1;
    rig_compare(&rig, batch);
    CHECK(rig_stats(&rig).phase[TSG_DECODE].graphs == 1 && rig_stats(&rig).phase[TSG_PREFILL].graphs == 2);
    free(batch);
    rig_close(&rig);
}

static void from_slots_to_the_stage(void) {
    struct spec spec = small;
    spec.n_slots     = 15;
    struct rig rig   = rig_open(&spec);
    rig_compare_random(&rig, rig.paged.backend, SLOT_TOKENS, 1);
    CHECK(rig_stats(&rig).phase[TSG_PREFILL].streamed == 0);
    rig_compare_random(&rig, rig.paged.backend, SLOT_TOKENS + 1, 2);
    const struct tsg_counts c = rig_stats(&rig).phase[TSG_PREFILL];
    CHECK(c.streamed == 2 && c.bytes_device == 15 * expert_bytes(&spec));  // what lies in slots is not moved over the link again
    rig_close(&rig);
}

static void the_stage_is_as_wide_as_the_layer(void) {  // CUDA splits the sums by the number of experts: other bits in a wider one
    const struct spec spec = { .type = GGML_TYPE_F32, .n_layers = 2, .n_expert = { 12, 5 }, .n_used = 2, .n_slots = 9 };
    struct rig        rig  = rig_open(&spec);
    rig_compare_random(&rig, rig.paged.backend, 100, 1);
    CHECK(rig_stage(&rig.pager->pools[0], 0)->ne[2] == 5 && rig.pager->pools[0].max_expert == 12);
    rig_close(&rig);
}

static void a_long_prompt_of_few_experts_goes_through_the_cache(void) {
    struct rig rig = rig_open(&small);
    for (uint64_t seed = 1; rig_stats(&rig).slots_used < 8; seed++) {  // no slot is free: it must evict
        rig_compare_random(&rig, rig.paged.backend, 1, seed);
    }
    struct batch * batch = batch_random(&small, 50, 1);
    for (int32_t i = 0; i < 100; i++) {
        int32_t * order = batch->order[i / 50] + 8 * (i % 50);
        order[0]        = 1 + i % 2;
        order[1]        = 5;
    }
    rig_compare(&rig, batch);
    rig_compare(&rig, batch);
    const struct tsg_counts c = rig_stats(&rig).phase[TSG_PREFILL];
    CHECK(c.streamed == 4 && c.lookups == 12 && c.misses > 0 && c.evictions == c.misses);
    CHECK(c.bytes_link == c.misses * expert_bytes(&small) && c.bytes_device == c.lookups * expert_bytes(&small));
    free(batch);
    rig_close(&rig);
}

static void a_long_prompt_spares_the_working_set(void) {
    struct rig rig = rig_open(&small);
    // An empty pool: each layer takes its share of the free slots, no more.
    rig_compare_random(&rig, rig.paged.backend, 100, 1);
    for (int32_t l = 0; l < 2; l++) {
        struct tsg_expert experts[8];
        int               n = 0;
        CHECK(tsg_expert_get_layer(rig.pager, l, experts) == TSG_OK);
        for (int32_t e = 0; e < 8; e++) {
            n += experts[e].slot >= 0;
        }
        CHECK(n == 4);
    }
    // A pool in use: the prompt leaves it as decode had it.
    for (uint64_t seed = 2; seed < 6; seed++) {
        rig_compare_random(&rig, rig.paged.backend, 1, seed);
    }
    struct tsg_expert before[2][8], after[2][8];
    CHECK(tsg_expert_get_layer(rig.pager, 0, before[0]) == TSG_OK && tsg_expert_get_layer(rig.pager, 1, before[1]) == TSG_OK);
    rig_compare_random(&rig, rig.paged.backend, 100, 6);
    CHECK(tsg_expert_get_layer(rig.pager, 0, after[0]) == TSG_OK && tsg_expert_get_layer(rig.pager, 1, after[1]) == TSG_OK);
    for (int i = 0; i < 16; i++) {
        CHECK(before[i / 8][i % 8].slot == after[i / 8][i % 8].slot);
        CHECK(before[i / 8][i % 8].last_use == after[i / 8][i % 8].last_use);
    }
    rig_close(&rig);
}

static void a_pool_of_everything(void) {
    struct spec spec = small;
    spec.n_slots     = 1000;  // more than there are experts
    struct rig rig   = rig_open(&spec);
    rig_compare_random(&rig, rig.paged.backend, 3, 1);
    rig_compare_random(&rig, rig.paged.backend, 50, 2);
    const struct tsg_stats stats = rig_stats(&rig);
    CHECK(stats.all_resident && stats.slots_total == 16 && stats.slots_used == 16 && stats.stage_bytes == 0);
    // nobody reads the ids: a lookup is one routed expert of one token
    CHECK(stats.phase[TSG_DECODE].lookups == 3 * 2 * 2 && stats.phase[TSG_DECODE].hits == 12 && stats.phase[TSG_DECODE].graphs == 1);
    CHECK(stats.phase[TSG_PREFILL].lookups == 50 * 2 * 2 && stats.phase[TSG_PREFILL].hits == 200 && stats.phase[TSG_PREFILL].misses == 0);
    CHECK(stats.phase[0].bytes_link + stats.phase[1].bytes_link + stats.phase[0].bytes_device == 0);
    rig_close(&rig);
}

static void memory_nobody_filled_is_zero(void) {  // a NaN pattern in a slot that is read past the last expert would spread
    struct spec spec = small;
    spec.type        = GGML_TYPE_Q8_0;
    spec.tables      = true;
    struct rig rig   = rig_open(&spec);
    rig_compare_random(&rig, rig.paged.backend, 1, 1);
    const struct tsg_pool * pool = &rig.pager->pools[0];
    CHECK(pool->slots.n_used == 4);
    for (int32_t p = 0; p < 3; p++) {
        const size_t size = pool->layout[p].bytes;
        CHECK(pool->slot[p]->ne[2] == 8 && rig_stage(pool, p)->ne[2] == 8);
        for (int32_t s = 0; s < 9; s++) {  // with the one behind the last
            const uint8_t * slot  = (uint8_t *) pool->slot[p]->data + (size_t) s * size;
            const uint8_t * stage = (uint8_t *) rig_stage(pool, p)->data + (size_t) s * size;
            bool            zero = true, stage_zero = true;
            for (size_t i = 0; i < size; i++) {
                zero       &= slot[i] == 0;
                stage_zero &= stage[i] == 0;
            }
            CHECK(stage_zero && zero == (s == 8 || pool->slots.expert_in[s] < 0));
            CHECK((((float *) pool->scale[p]->data)[s] == 0) == zero);
        }
    }
    rig_close(&rig);
}

int main(int argc, char ** argv) {
    const struct test tests[] = {
        TEST(counters_of_decode),
        TEST(from_decode_to_prefill),
        TEST(from_slots_to_the_stage),
        TEST(the_stage_is_as_wide_as_the_layer),
        TEST(a_long_prompt_of_few_experts_goes_through_the_cache),
        TEST(a_long_prompt_spares_the_working_set),
        TEST(a_pool_of_everything),
        TEST(memory_nobody_filled_is_zero),
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
