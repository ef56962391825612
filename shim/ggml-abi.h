// ggml-abi.h - the internal structures of ggml that a backend implements or walks, for ggml 0.25.3 only.
//
// The wheel of llama-cpp-python ships ggml's public headers, not these. GGML_BACKEND_API_VERSION has been 2 since 2025-09 while slots were inserted
// into the tables below, so it guards nothing: the layout is fixed by the version check in CMakeLists.txt (find_package EXACT), by the static
// asserts at the end, and by tsg_abi_check() at run time. Layout facts from ggml/src/ggml-backend-impl.h and ggml/src/ggml-impl.h.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <assert.h>

#define GGML_BACKEND_API_VERSION 2

// ---- buffer types and buffers ----

struct ggml_backend_buffer_type_i {
    const char *          (*get_name)(ggml_backend_buffer_type_t buft);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t buft, size_t size);
    size_t                (*get_alignment)(ggml_backend_buffer_type_t buft);
    size_t                (*get_max_size)(ggml_backend_buffer_type_t buft);
    size_t                (*get_alloc_size)(ggml_backend_buffer_type_t buft, const struct ggml_tensor * tensor);
    bool                  (*is_host)(ggml_backend_buffer_type_t buft);
};

struct ggml_backend_buffer_type {
    struct ggml_backend_buffer_type_i iface;
    ggml_backend_dev_t                device;
    void *                            context;
};

struct ggml_backend_buffer_i {
    void             (*free_buffer)(ggml_backend_buffer_t buffer);
    void *           (*get_base)(ggml_backend_buffer_t buffer);
    enum ggml_status (*init_tensor)(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor);
    void             (*memset_tensor)(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, uint8_t value, size_t offset, size_t size);
    void             (*set_tensor)(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
    void             (*get_tensor)(ggml_backend_buffer_t buffer, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
    void             (*set_tensor_2d)(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                                      size_t n_copies, size_t stride_tensor, size_t stride_data);
    void             (*get_tensor_2d)(ggml_backend_buffer_t buffer, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size,
                                      size_t n_copies, size_t stride_tensor, size_t stride_data);
    bool             (*cpy_tensor)(ggml_backend_buffer_t buffer, const struct ggml_tensor * src, struct ggml_tensor * dst);
    void             (*clear)(ggml_backend_buffer_t buffer, uint8_t value);
    void             (*reset)(ggml_backend_buffer_t buffer);
};

struct ggml_backend_buffer {
    struct ggml_backend_buffer_i   iface;
    ggml_backend_buffer_type_t     buft;
    void *                         context;
    size_t                         size;
    enum ggml_backend_buffer_usage usage;
};

GGML_API ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t buft, struct ggml_backend_buffer_i iface, void * context,
                                                        size_t size);

// ---- backends (streams) ----

struct ggml_backend_graph_optimize_params;

struct ggml_backend_i {
    const char *     (*get_name)(ggml_backend_t backend);
    void             (*free)(ggml_backend_t backend);
    void             (*set_tensor_async)(ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
    void             (*get_tensor_async)(ggml_backend_t backend, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
    void             (*set_tensor_2d_async)(ggml_backend_t backend, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                                            size_t n_copies, size_t stride_tensor, size_t stride_data);
    void             (*get_tensor_2d_async)(ggml_backend_t backend, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size,
                                            size_t n_copies, size_t stride_tensor, size_t stride_data);
    bool             (*cpy_tensor_async)(ggml_backend_t backend_src, ggml_backend_t backend_dst, const struct ggml_tensor * src,
                                         struct ggml_tensor * dst);
    void             (*synchronize)(ggml_backend_t backend);
    ggml_backend_graph_plan_t (*graph_plan_create)(ggml_backend_t backend, const struct ggml_cgraph * graph);
    void             (*graph_plan_free)(ggml_backend_t backend, ggml_backend_graph_plan_t plan);
    void             (*graph_plan_update)(ggml_backend_t backend, ggml_backend_graph_plan_t plan, const struct ggml_cgraph * graph);
    enum ggml_status (*graph_plan_compute)(ggml_backend_t backend, ggml_backend_graph_plan_t plan);
    enum ggml_status (*graph_compute)(ggml_backend_t backend, struct ggml_cgraph * graph);
    void             (*event_record)(ggml_backend_t backend, ggml_backend_event_t event);
    void             (*event_wait)(ggml_backend_t backend, ggml_backend_event_t event);
    void             (*graph_optimize)(ggml_backend_t backend, struct ggml_cgraph * graph, struct ggml_backend_graph_optimize_params * params);
};

struct ggml_backend {
    ggml_guid_t           guid;
    struct ggml_backend_i iface;
    ggml_backend_dev_t    device;
    void *                context;
};

struct ggml_backend_event {
    struct ggml_backend_device * device;
    void *                       context;  // of a CUDA event: the cudaEvent_t
};

// ---- devices and registries ----

struct ggml_backend_device_i {
    const char *               (*get_name)(ggml_backend_dev_t dev);
    const char *               (*get_description)(ggml_backend_dev_t dev);
    void                       (*get_memory)(ggml_backend_dev_t dev, size_t * free, size_t * total);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t dev);
    void                       (*get_props)(ggml_backend_dev_t dev, struct ggml_backend_dev_props * props);
    ggml_backend_t             (*init_backend)(ggml_backend_dev_t dev, const char * params);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t dev);
    ggml_backend_buffer_type_t (*get_host_buffer_type)(ggml_backend_dev_t dev);
    ggml_backend_buffer_t      (*buffer_from_host_ptr)(ggml_backend_dev_t dev, void * ptr, size_t size, size_t max_tensor_size);
    bool                       (*supports_op)(ggml_backend_dev_t dev, const struct ggml_tensor * op);
    bool                       (*supports_buft)(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft);
    bool                       (*offload_op)(ggml_backend_dev_t dev, const struct ggml_tensor * op);
    ggml_backend_event_t       (*event_new)(ggml_backend_dev_t dev);
    void                       (*event_free)(ggml_backend_dev_t dev, ggml_backend_event_t event);
    void                       (*event_synchronize)(ggml_backend_dev_t dev, ggml_backend_event_t event);
};

struct ggml_backend_device {
    struct ggml_backend_device_i iface;
    ggml_backend_reg_t           reg;
    void *                       context;
};

struct ggml_backend_reg_i {
    const char *       (*get_name)(ggml_backend_reg_t reg);
    size_t             (*get_device_count)(ggml_backend_reg_t reg);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t reg, size_t index);
    void *             (*get_proc_address)(ggml_backend_reg_t reg, const char * name);
};

struct ggml_backend_reg {
    int                       api_version;
    struct ggml_backend_reg_i iface;
    void *                    context;
};

// ---- graphs ----

struct ggml_hash_set {
    size_t                size;
    uint32_t *            used;
    struct ggml_tensor ** keys;
};

enum ggml_cgraph_eval_order {
    GGML_CGRAPH_EVAL_ORDER_LEFT_TO_RIGHT = 0,
    GGML_CGRAPH_EVAL_ORDER_RIGHT_TO_LEFT,
    GGML_CGRAPH_EVAL_ORDER_COUNT
};

struct ggml_cgraph {
    int                         size;
    int                         n_nodes;
    int                         n_leafs;
    struct ggml_tensor **       nodes;
    struct ggml_tensor **       grads;
    struct ggml_tensor **       grad_accs;
    struct ggml_tensor **       leafs;
    int32_t *                   use_counts;
    struct ggml_hash_set        visited_hash_set;
    enum ggml_cgraph_eval_order order;
    uint64_t                    uid;  // the same non-zero uid = the same graph
};

// Nodes [i0, i1) as a graph that keeps the use counts: the fusions of the CUDA backend need them, a graph rebuilt node by node has none.
GGML_API struct ggml_cgraph ggml_graph_view(struct ggml_cgraph * graph, int i0, int i1);

// ---- log ----

GGML_API void ggml_log_internal(enum ggml_log_level level, const char * format, ...) __attribute__((format(printf, 2, 3)));

// ---- what must hold for the layout above (LP64) ----

#define TSG_PTR sizeof(void *)
static_assert(sizeof(void *) == 8, "the shim is written for 64-bit targets");
static_assert(sizeof(struct ggml_backend_buffer_type_i) == 6 * TSG_PTR, "ggml_backend_buffer_type_i");
static_assert(sizeof(struct ggml_backend_buffer_i) == 11 * TSG_PTR, "ggml_backend_buffer_i");
static_assert(sizeof(struct ggml_backend_i) == 16 * TSG_PTR, "ggml_backend_i");
static_assert(sizeof(struct ggml_backend_device_i) == 15 * TSG_PTR, "ggml_backend_device_i");
static_assert(sizeof(struct ggml_backend_reg_i) == 4 * TSG_PTR, "ggml_backend_reg_i");
static_assert(sizeof(struct ggml_cgraph) == 96, "ggml_cgraph");
static_assert(sizeof(struct ggml_tensor) == 336, "ggml_tensor");
static_assert(GGML_OP_COUNT == 101, "ggml_op: an operation was added or removed");
static_assert(GGML_MAX_SRC == 10, "GGML_MAX_SRC");
