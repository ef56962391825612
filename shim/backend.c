// backend.c - the proxy backend: one stream of the inner device. Everything is forwarded; graphs take the way through the engine.
#include "pager.h"

#include <stdlib.h>

struct tsg_backend {
    ggml_backend_t       inner;  // first: device.c reads it
    struct tsg_engine *  engine;
    struct tsg_pager *   pager;
    struct ggml_backend  self;
};

static ggml_guid tsg_guid = { 0x74, 0x69, 0x6e, 0x79, 0x73, 0x65, 0x72, 0x76, 0x65, 0x2d, 0x67, 0x67, 0x75, 0x66, 0x00, 0x01 };

static ggml_backend_t inner_of(ggml_backend_t backend) {
    return ((struct tsg_backend *) backend->context)->inner;
}

static const char * tsg_backend_get_name(ggml_backend_t backend) {
    return ggml_backend_name(inner_of(backend));
}

static void tsg_backend_free(ggml_backend_t backend) {
    struct tsg_backend * self  = backend->context;
    struct tsg_pager *   pager = self->pager;
    tsg_engine_free(self->engine);
    ggml_backend_free(self->inner);
    free(self);
    tsg_pager_unref(pager);
}

static void tsg_backend_set_tensor_async(ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    ggml_backend_tensor_set_async(inner_of(backend), tensor, data, offset, size);
}

static void tsg_backend_get_tensor_async(ggml_backend_t backend, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    ggml_backend_tensor_get_async(inner_of(backend), tensor, data, offset, size);
}

static void tsg_backend_set_tensor_2d_async(ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                                            size_t n_copies, size_t stride_tensor, size_t stride_data) {
    ggml_backend_tensor_set_2d_async(inner_of(backend), tensor, data, offset, size, n_copies, stride_tensor, stride_data);
}

static void tsg_backend_get_tensor_2d_async(ggml_backend_t backend, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size,
                                            size_t n_copies, size_t stride_tensor, size_t stride_data) {
    ggml_backend_tensor_get_2d_async(inner_of(backend), tensor, data, offset, size, n_copies, stride_tensor, stride_data);
}

static bool is_ours(ggml_backend_t backend) {
    return backend->guid == &tsg_guid;
}

// Between two devices: the inner backends know the fast way if they are of one kind.
static bool tsg_backend_cpy_tensor_async(ggml_backend_t src_backend, ggml_backend_t dst_backend, const struct ggml_tensor * src,
                                         struct ggml_tensor * dst) {
    ggml_backend_t src_inner = is_ours(src_backend) ? inner_of(src_backend) : src_backend;
    ggml_backend_t dst_inner = is_ours(dst_backend) ? inner_of(dst_backend) : dst_backend;
    return dst_inner->iface.cpy_tensor_async && dst_inner->iface.cpy_tensor_async(src_inner, dst_inner, src, dst);
}

static void tsg_backend_synchronize(ggml_backend_t backend) {
    ggml_backend_synchronize(inner_of(backend));
}

static enum ggml_status tsg_backend_graph_compute(ggml_backend_t backend, struct ggml_cgraph * graph) {
    return tsg_engine_compute(((struct tsg_backend *) backend->context)->engine, graph);
}

static void tsg_backend_event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    ggml_backend_event_record(event, inner_of(backend));
}

static void tsg_backend_event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    ggml_backend_event_wait(inner_of(backend), event);
}

static void tsg_backend_graph_optimize(ggml_backend_t backend, struct ggml_cgraph * graph, struct ggml_backend_graph_optimize_params * params) {
    inner_of(backend)->iface.graph_optimize(inner_of(backend), graph, params);
}

ggml_backend_t tsg_backend_new(struct tsg_pager * pager, const char * params) {
    if (!pager->committed) {
        tsg_fail(TSG_E_STATE, "commit the pager before its device is used");
        return NULL;
    }
    ggml_backend_t       inner = ggml_backend_dev_init(pager->inner, params);
    struct tsg_backend * self  = calloc(1, sizeof(struct tsg_backend));
    struct tsg_engine *  engine = inner && self ? tsg_engine_new(pager, inner) : NULL;
    if (!engine) {
        free(self);
        ggml_backend_free(inner);
        tsg_fail(TSG_E_MEMORY, "a stream of %s cannot be made", ggml_backend_dev_name(pager->inner));
        return NULL;
    }
    tsg_pager_ref(pager);
    const struct ggml_backend_i * has = &inner->iface;
    *self = (struct tsg_backend) {
        .inner  = inner,
        .engine = engine,
        .pager  = pager,
        .self = {
            .guid  = &tsg_guid,
            .iface = {
                .get_name            = tsg_backend_get_name,
                .free                = tsg_backend_free,
                .set_tensor_async    = has->set_tensor_async ? tsg_backend_set_tensor_async : NULL,
                .get_tensor_async    = has->get_tensor_async ? tsg_backend_get_tensor_async : NULL,
                .set_tensor_2d_async = has->set_tensor_2d_async ? tsg_backend_set_tensor_2d_async : NULL,
                .get_tensor_2d_async = has->get_tensor_2d_async ? tsg_backend_get_tensor_2d_async : NULL,
                .cpy_tensor_async    = has->cpy_tensor_async ? tsg_backend_cpy_tensor_async : NULL,
                .synchronize         = has->synchronize ? tsg_backend_synchronize : NULL,
                .graph_compute       = tsg_backend_graph_compute,
                .event_record        = has->event_record ? tsg_backend_event_record : NULL,
                .event_wait          = has->event_wait ? tsg_backend_event_wait : NULL,
                .graph_optimize      = has->graph_optimize ? tsg_backend_graph_optimize : NULL,
            },
            .device  = &pager->device,
            .context = self,
        },
    };
    return &self->self;
}
