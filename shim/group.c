// group.c - a model on several devices: a pager for each, and the little that they share.
//
// Every device has a pager of its own, with the layers that llama.cpp puts there: its own slots, stages, ring, policy and captured graphs, and its own lock, so
// that one device's copies run beside another's computation. A layer's experts are mapped and page-locked by the pager of its device, which is once. Shared is
// only how much memory may be locked: what one pager has locked the kernel does not count as taken, and all of them together must not take more than there is.
//
// With several devices the loader is not told by name where experts go. Each proxy offers its expert buffer type as an extra one and refuses its planned weights
// anywhere else, so that they go where llama.cpp puts their layer. Overrides by name would do the same, but llama.cpp then gives up pipeline parallelism.
#include "pager.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tsg_group {
    atomic_int         refs;
    mtx_t              lock;
    uint64_t           free_before;  // bytes that might be locked before the first pager began
    uint64_t           locked;       // by all of them
    int32_t            n_members;
    ggml_backend_dev_t inner[TSG_MAX_DEVICES];
};

static struct tsg_group * group_new(ggml_backend_dev_t inner) {
    struct tsg_group * group = calloc(1, sizeof(struct tsg_group));
    if (group) {
        atomic_init(&group->refs, 1);
        mtx_init(&group->lock, mtx_plain);
        group->inner[group->n_members++] = inner;
    }
    return group;
}

static const char * own_type_get_name(ggml_backend_buffer_type_t buft) {
    return ((const struct tsg_pager *) buft->device->context)->inner_name;
}

// The CPU may be there more than once, to try a split out. Then the proxies need types of their own: the scheduler asks by type who reads a tensor.
static void use_own_type(struct tsg_pager * pager, int32_t member) {
    pager->inner_buft                = *ggml_backend_dev_buffer_type(pager->inner);
    pager->inner_buft.device         = &pager->device;
    pager->inner_buft.iface.get_name = own_type_get_name;
    pager->is_second                 = true;
    snprintf(pager->inner_name, sizeof(pager->inner_name), "%s %d", ggml_backend_dev_name(pager->inner), member);
}

enum tsg_status tsg_pager_join(struct tsg_pager * pager, struct tsg_pager * other) {
    if (pager->committed || pager->group || pager == other) {
        return tsg_fail(TSG_E_STATE, "a pager joins another one once, before it is committed");
    }
    struct tsg_group * group = other->group ? other->group : group_new(other->inner);
    if (!group) {
        return tsg_fail(TSG_E_MEMORY, "no memory for a model on several devices");
    }
    other->group = group;
    if (group->n_members == TSG_MAX_DEVICES) {
        return tsg_fail(TSG_E_ARGUMENT, "llama.cpp splits a model over %d devices at most", TSG_MAX_DEVICES);
    }
    bool twice = false;
    for (int32_t i = 0; i < group->n_members; i++) {
        twice |= group->inner[i] == pager->inner;
    }
    if (twice && !pager->inner_is_cpu) {
        return tsg_fail(TSG_E_ARGUMENT, "%s cannot be two devices of one model", ggml_backend_dev_name(pager->inner));
    }
    if (twice) {
        use_own_type(pager, group->n_members);
    }
    snprintf(pager->buft_name, sizeof(pager->buft_name), "Experts %d", group->n_members);  // the loader tells buffer types apart by name
    group->inner[group->n_members++] = pager->inner;
    atomic_fetch_add(&group->refs, 1);
    pager->group = group;
    return TSG_OK;
}

void tsg_group_leave(struct tsg_pager * pager) {
    struct tsg_group * group = pager->group;
    pager->group             = NULL;
    if (group && atomic_fetch_sub(&group->refs, 1) == 1) {
        mtx_destroy(&group->lock);
        free(group);
    }
}

// ---- memory that may be locked ----

uint64_t tsg_lockable(struct tsg_pager * pager) {
    struct tsg_group * group = pager->group;
    const uint64_t     limit = pager->host.limit ? pager->host.limit : UINT64_MAX;
    uint64_t           room  = pager->host.ops->available(pager);
    if (!group) {
        const uint64_t left = limit > pager->host.locked ? limit - pager->host.locked : 0;
        return room < left ? room : left;
    }
    room = room < limit ? room : limit;
    mtx_lock(&group->lock);
    if (group->locked == 0) {
        group->free_before = room;
    }
    const uint64_t left = group->free_before > group->locked ? group->free_before - group->locked : 0;
    mtx_unlock(&group->lock);
    return room < left ? room : left;
}

void tsg_locked(struct tsg_pager * pager, uint64_t bytes) {
    pager->host.locked += bytes;
    if (pager->group) {
        mtx_lock(&pager->group->lock);
        pager->group->locked += bytes;
        mtx_unlock(&pager->group->lock);
    }
}

void tsg_unlocked(struct tsg_pager * pager) {
    if (pager->group) {
        mtx_lock(&pager->group->lock);
        pager->group->locked -= pager->host.locked;
        mtx_unlock(&pager->group->lock);
    }
    pager->host.locked = 0;
}

// ---- which buffer goes where ----

static bool is_planned(const struct tsg_pager * pager, const char * name) {
    for (int32_t l = 0; l < pager->n_layers; l++) {
        for (int32_t p = 0; p < pager->layers[l]->n_parts; p++) {
            if (strcmp(pager->layers[l]->weight[p].name, name) == 0) {
                return true;
            }
        }
    }
    return false;
}

bool tsg_group_wants(const struct tsg_pager * pager, const struct ggml_tensor * op) {
    const struct ggml_tensor * weight = op->src[0];
    if (!pager->group || op->op != GGML_OP_MUL_MAT_ID || !weight->buffer || weight->data) {
        return true;
    }
    return is_planned(pager, weight->name) == (weight->buffer->buft == &pager->buft);
}

bool tsg_group_reads(const struct tsg_pager * pager, ggml_backend_buffer_type_t buft) {
    if (buft == &pager->buft || (pager->is_second && buft == &pager->inner_buft)) {
        return true;
    }
    const bool of_a_proxy = buft->device && buft->device->iface.get_name == pager->device.iface.get_name;
    return !of_a_proxy && !pager->is_second && ggml_backend_dev_supports_buft(pager->inner, buft);
}
