// slots.h - which expert lies in which slot of a pool. Pure bookkeeping: no ggml, no device, no lock.
#pragma once

#include "policy.h"

// Experts of a pool are numbered over all its layers: id = first expert of the layer + expert.
struct tsg_slots {
    enum tsg_policy policy;
    int32_t         n_slots;
    int32_t         n_experts;
    int32_t         n_open;       // slots from here on hold whole layers: nobody enters or leaves; n_slots = none do
    int32_t         n_used;       // slots that hold an expert
    int32_t         n_pinned;
    int32_t         n_protected;  // SLRU
    uint64_t        clock;        // ticks: one per tsg_slots_acquire
    uint64_t        period;       // ticks per graph

    int32_t *        slot_of;    // [n_experts] -> slot, -1 = host memory only
    int32_t *        expert_in;  // [n_slots]   -> expert, -1 = free
    bool *           pinned;     // [n_experts]
    bool *           loading;    // [n_experts] has a slot, but the copy into it is on its way: not a victim
    struct tsg_use * use;        // [n_experts]
    uint64_t *       in_step;    // [n_slots] clock of the step that needs it: not a victim in that step
    uint64_t *       hits;       // [n_experts]
    uint64_t *       misses;     // [n_experts]
    uint64_t *       prefill;    // [n_experts] of the hits and misses, those of prefill
};

struct tsg_load {
    int32_t expert;
    int32_t slot;
};

enum tsg_admit {
    TSG_ADMIT_ALL,   // every expert gets a slot, or the call fails
    TSG_ADMIT_FREE,  // misses take free slots only: nothing is evicted
};

bool tsg_slots_init(struct tsg_slots * slots, enum tsg_policy policy, int32_t n_slots, int32_t n_experts, int32_t period);
void tsg_slots_free(struct tsg_slots * slots);

// One layer step that needs the `n` distinct `experts`. slot[i] becomes the slot of experts[i], or -1 if it was not admitted; `loads` (room for n)
// lists what the caller must now copy into which slot. At most `max_loads` experts are admitted with TSG_ADMIT_FREE, in the order given.
// Returns the number of loads, or -1 if TSG_ADMIT_ALL cannot be met: then nothing changed, not even the counts.
int32_t tsg_slots_acquire(struct tsg_slots * slots, const int32_t * experts, int32_t n, enum tsg_phase phase, enum tsg_admit admit,
                          int32_t max_loads, int32_t * slot, struct tsg_load * loads, struct tsg_counts * counts);

// A miss of the step that was just acquired gets a slot. False, changing nothing, if there is no victim, or, if it must be `earned`, one that decode
// wants at least as much. A free slot is nobody's.
bool tsg_slots_admit(struct tsg_slots * slots, int32_t expert, bool earned, struct tsg_load * out, struct tsg_counts * counts);

// Puts an expert into a slot, or empties one, whatever the policy says; it leaves where it lay. Not counted.
void tsg_slots_put(struct tsg_slots * slots, int32_t expert, int32_t slot);
void tsg_slots_clear(struct tsg_slots * slots, int32_t slot);

// Every expert in the slot of its own number, in a pool with room for all.
void tsg_slots_fill(struct tsg_slots * slots);

// By hand. Each returns false, changing nothing, if it cannot be done (everything else pinned; pinned experts are not evicted).
bool tsg_slots_load(struct tsg_slots * slots, int32_t expert, struct tsg_load * load, struct tsg_counts * counts);  // load->slot < 0: already resident
bool tsg_slots_pin(struct tsg_slots * slots, int32_t expert, int32_t keep_free);  // expert is resident; keep_free slots must stay unpinned
void tsg_slots_unpin(struct tsg_slots * slots, int32_t expert);
bool tsg_slots_evict(struct tsg_slots * slots, int32_t expert);

// Before anything is used: the expert gets a free slot, from the last one down, so that of those that nothing else tells apart the first ones stay longest.
// It counts as never used: seeding the policies with its popularity of earlier runs cost 1 to 6 points of the hit rate over the first 64 tokens of routing
// drawn at random on another topic. False, changing nothing: it has a slot, or none is free.
bool tsg_slots_preload(struct tsg_slots * slots, int32_t expert, struct tsg_load * out);

// survivors.c: the bookkeeping of a pool that gets `n_slots`, at least as many as are pinned, as `out`. Those whom the policy would evict last stay; with
// room for all, everybody is resident in the slot of its own number. `place` is each expert's number in its layer, from[n_slots] becomes the slot that
// the bytes of each new slot come from, -1 = none. False: no memory, and `out` is nothing.
bool tsg_slots_resized(const struct tsg_slots * old, int32_t n_slots, const int32_t * place, struct tsg_slots * out, int32_t * from);

void tsg_slots_set_policy(struct tsg_slots * slots, enum tsg_policy policy);

// NULL if the maps are a bijection and the counts agree, else what is wrong.
const char * tsg_slots_check(const struct tsg_slots * slots);
