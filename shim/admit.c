// admit.c - which misses enter the pool, and how they get there.
//
// A miss that the CPU computes costs nothing to leave out, so the pool is for experts that come back: one enters if decode wants it more than the one that
// the policy would have leave, by the decayed count that LFU and LFRU score with, and at most one for so many misses. Both are counts, not clocks.
// Routing drawn at random, as skewed as that of gpt-oss-20b, with a quarter of the experts in slots: admitting every miss gives a hit rate of 63 % and 36
// copies a token, one in 8 gives 67 % and 4, the comparison 69 % and 0.3. Where topics last it costs one point of the hit rate, for a twentieth of the copies.
//
// The copy runs beside everything else, on a stream of its own, and until its event says that it is there the expert goes on being a miss: on CUDA a run
// repeats as far as copies arrive between the same tokens.
#include "coexec.h"

#include "engine.h"

// ---- copies ----

static bool copy_row(struct tsg_engine * e, const struct ggml_tensor * to, const void * from, size_t size, int32_t slot) {
    const struct tsg_cuda * cuda = e->pager->resident->cuda;
    return tsg_cuda_ok(cuda, cuda->copy_to_device_async((tsg_cu_ptr) to->data + (size_t) slot * size, from, size, e->side), "cuMemcpyHtoDAsync");
}

// On our side stream. What lay in the slot is read by nobody: the router's ids were waited for, and this step does not use it.
static bool copy_beside(struct tsg_engine * e, const struct tsg_layer * layer, int32_t expert, int32_t slot) {
    const struct tsg_pool * pool = &e->pager->pools[layer->pool];
    bool ok = tsg_cuda_enter(e->pager->resident->cuda) && tsg_resident_delay(e->pager, e->side, true, 0);
    for (int32_t p = 0; p < layer->n_parts && ok; p++) {
        const struct tsg_weight * w = &layer->weight[p];
        ok = copy_row(e, pool->slot[p], w->host + (size_t) expert * w->bytes, w->bytes, slot) &&
             (!w->bias || copy_row(e, pool->bias[p], w->bias + expert * w->ne1, (size_t) w->ne1 * sizeof(float), slot)) &&
             (!w->scale || copy_row(e, pool->scale[p], w->scale + expert, sizeof(float), slot));
    }
    return ok && tsg_resident_delay(e->pager, e->side, false, tsg_layer_expert_bytes(layer));
}

// ---- choosing ----

// The missing expert that decode wants most, or -1. Ties go to the lowest number.
static int32_t most_popular(const struct tsg_engine * e, const struct tsg_slots * slots, const bool * candidate) {
    int32_t  best = -1;
    uint32_t most = 0;
    for (int32_t i = 0; i < e->n_distinct; i++) {
        const uint32_t freq = candidate[i] ? tsg_use_freq(&slots->use[e->global[i]], slots->clock, slots->period) : 0;
        if (candidate[i] && (best < 0 || freq > most)) {
            best = i;
            most = freq;
        }
    }
    return best;
}

// How many of `n` misses to fetch so that link and CPU finish together.
static int32_t share_of_link(const struct tsg_miss * miss, int32_t n) {
    const double fetch = miss->link_rate > 0 ? 1 / miss->link_rate : 0, compute = miss->cpu_rate > 0 ? 1 / miss->cpu_rate : 0;
    int32_t      best  = 0;
    double       least = n * compute;
    for (int32_t f = 1; f <= n && fetch > 0 && compute > 0; f++) {
        const double time = f * fetch > (n - f) * compute ? f * fetch : (n - f) * compute;
        if (time < least) {
            least = time;
            best  = f;
        }
    }
    return best;
}

// Those of the missing that are not on their way already.
static void list_candidates(struct tsg_engine * e, const struct tsg_slots * slots, const bool * missing) {
    for (int32_t i = 0; i < e->n_distinct; i++) {
        e->corun->candidate[i] = missing[i] && slots->slot_of[e->global[i]] < 0;
    }
}

int32_t tsg_admit_fetch(struct tsg_engine * e, const struct tsg_step * step, bool * missing) {
    struct tsg_pager *  pager     = e->pager;
    struct tsg_pool *   pool      = tsg_engine_pool(e, step);
    struct tsg_counts * counts    = &pager->counts[TSG_DECODE];
    bool *              candidate = e->corun->candidate;
    int32_t             n         = 0;
    list_candidates(e, &pool->slots, missing);
    for (int32_t i = 0; i < e->n_distinct; i++) {
        n += missing[i];
    }
    const int32_t want = pager->coexec.miss.mode == TSG_MISS_SPLIT ? share_of_link(&pager->coexec.miss, n) : 0;
    int32_t       done = 0;
    while (done < want) {
        const int32_t   i    = most_popular(e, &pool->slots, candidate);
        struct tsg_load load = { .slot = -1 };
        if (i < 0 || !tsg_slots_admit(&pool->slots, e->global[i], false, &load, counts)) {
            break;  // nobody can leave: the CPU computes the rest
        }
        if (!pager->resident) {
            tsg_pool_load_slot(pool, e->inner, step->layer, e->distinct[i], load.slot);
        } else if (!copy_beside(e, step->layer, e->distinct[i], load.slot)) {
            return -1;
        }
        missing[i] = candidate[i] = false;
        e->slot[i]          = load.slot;
        counts->bytes_link += tsg_layer_expert_bytes(step->layer);
        done++;
    }
    return done == 0 || !pager->resident || tsg_inner_waits(e, e->side, TSG_EV_LAUNCH_OUT) ? done : -1;
}

// Starts the copy of a miss into a slot that it has earned. *done: it got one.
static bool admit(struct tsg_engine * e, const struct tsg_step * step, int32_t i, bool * done) {
    struct tsg_pager *  pager  = e->pager;
    struct tsg_coexec * x      = &pager->coexec;
    struct tsg_pool *   pool   = tsg_engine_pool(e, step);
    struct tsg_counts * counts = &pager->counts[TSG_DECODE];
    struct tsg_load     load;
    *done = (!pager->resident || x->n_pending < TSG_MAX_PENDING) && tsg_slots_admit(&pool->slots, e->global[i], true, &load, counts);
    if (!*done) {
        return true;
    }
    counts->bytes_link += tsg_layer_expert_bytes(step->layer);
    counts->admitted++;
    if (!pager->resident) {  // in the order of the inner stream: there for the next step
        tsg_pool_load_slot(pool, e->inner, step->layer, e->distinct[i], load.slot);
        return true;
    }
    struct tsg_pending * p = &x->pending[x->n_pending++];
    p->pool                = pool;
    p->expert              = e->global[i];
    p->done                = p->done ? p->done : ggml_backend_event_new(pager->inner);
    pool->slots.loading[p->expert] = true;
    return copy_beside(e, step->layer, e->distinct[i], load.slot) &&
           tsg_cuda_ok(pager->resident->cuda, pager->resident->cuda->event_record(p->done->context, e->side), "cuEventRecord");
}

bool tsg_admit_later(struct tsg_engine * e, const struct tsg_step * step, const bool * missing) {
    struct tsg_coexec *      x         = &e->pager->coexec;
    const struct tsg_slots * slots     = &tsg_engine_pool(e, step)->slots;
    bool *                   candidate = e->corun->candidate;
    const uint64_t           every     = (uint64_t) x->miss.every;
    list_candidates(e, slots, missing);
    for (int32_t i = 0; i < e->n_distinct; i++) {
        x->credit += missing[i];
    }
    bool ok = true;
    while (ok && every > 0 && x->credit >= every) {
        const int32_t i    = most_popular(e, slots, candidate);
        bool          done = false;
        if (i < 0) {
            break;
        }
        candidate[i] = false;
        ok           = admit(e, step, i, &done);
        x->credit   -= done ? every : 0;
    }
    x->credit = x->credit < 2 * every ? x->credit : 2 * every;  // what was not used is not saved up for a burst
    return ok;
}

// ---- arrivals ----

static void arrived(struct tsg_pending * p) {
    p->pool->slots.loading[p->expert] = false;
}

void tsg_admit_poll(struct tsg_pager * pager) {
    struct tsg_coexec * x = &pager->coexec;
    int32_t             n = 0;
    for (int32_t i = 0; i < x->n_pending; i++) {
        struct tsg_pending p = x->pending[i];
        if (pager->resident->cuda->event_query(p.done->context) == 0) {
            arrived(&p);
        } else {
            x->pending[i]   = x->pending[n];  // swapped: events are kept for later copies
            x->pending[n++] = p;
        }
    }
    x->n_pending = n;
}

void tsg_admit_settle(struct tsg_pager * pager) {
    struct tsg_coexec * x = &pager->coexec;
    for (int32_t i = 0; i < x->n_pending; i++) {
        ggml_backend_event_synchronize(x->pending[i].done);
        arrived(&x->pending[i]);
    }
    x->n_pending = 0;
}
