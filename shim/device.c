// device.c - the proxy device: every question goes to the inner device, except that expert buffers are welcome and backends are ours.
//
// It is passed in llama_model_params.devices and never registered, so other models in the process do not see it.
#include "pager.h"

#include <string.h>

static struct tsg_pager * pager_of(ggml_backend_dev_t dev) {
    return dev->context;
}

static ggml_backend_dev_t inner_of(ggml_backend_dev_t dev) {
    return pager_of(dev)->inner;
}

static const char * tsg_device_get_name(ggml_backend_dev_t dev) {
    return ggml_backend_dev_name(inner_of(dev));
}

static const char * tsg_device_get_description(ggml_backend_dev_t dev) {
    return ggml_backend_dev_description(inner_of(dev));
}

static void tsg_device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    ggml_backend_dev_memory(inner_of(dev), free, total);
}

// A GPU whatever is inside: llama.cpp offloads layers to GPUs only, and the CPU device takes this place in tests.
static enum ggml_backend_dev_type tsg_device_get_type(ggml_backend_dev_t dev) {
    (void) dev;
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void tsg_device_get_props(ggml_backend_dev_t dev, struct ggml_backend_dev_props * props) {
    ggml_backend_dev_get_props(inner_of(dev), props);
    props->type                      = GGML_BACKEND_DEVICE_TYPE_GPU;
    props->caps.buffer_from_host_ptr = false;
}

static ggml_backend_t tsg_device_init_backend(ggml_backend_dev_t dev, const char * params) {
    return tsg_backend_new(pager_of(dev), params);
}

static ggml_backend_buffer_type_t tsg_device_get_buffer_type(ggml_backend_dev_t dev) {
    return pager_of(dev)->is_second ? &pager_of(dev)->inner_buft : ggml_backend_dev_buffer_type(inner_of(dev));
}

// Never the expert buffer type: the loader swaps a device's host buffer type for plain CPU memory when it maps the file.
static ggml_backend_buffer_type_t tsg_device_get_host_buffer_type(ggml_backend_dev_t dev) {
    return ggml_backend_dev_host_buffer_type(inner_of(dev));
}

// Expert weights can be multiplied by expert id, and nothing else.
static bool tsg_device_supports_op(ggml_backend_dev_t dev, const struct ggml_tensor * op) {
    struct tsg_pager * pager = pager_of(dev);
    for (int i = 0; i < GGML_MAX_SRC && op->src[i]; i++) {
        if (tsg_weight_of(pager, op->src[i]) && !(op->op == GGML_OP_MUL_MAT_ID && i == 0)) {
            return false;
        }
    }
    return tsg_group_wants(pager, op) && ggml_backend_dev_supports_op(pager->inner, op);
}

static bool tsg_device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return tsg_group_reads(pager_of(dev), buft);
}

static bool tsg_device_offload_op(ggml_backend_dev_t dev, const struct ggml_tensor * op) {
    return ggml_backend_dev_offload_op(inner_of(dev), op);
}

static ggml_backend_event_t tsg_device_event_new(ggml_backend_dev_t dev) {
    return ggml_backend_event_new(inner_of(dev));
}

static void tsg_device_event_free(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    (void) dev;
    ggml_backend_event_free(event);
}

static void tsg_device_event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    (void) dev;
    ggml_backend_event_synchronize(event);
}

// ---- registry of one device ----

static const char * tsg_reg_get_name(ggml_backend_reg_t reg) {
    (void) reg;
    return "tinyserve";
}

static size_t tsg_reg_get_device_count(ggml_backend_reg_t reg) {
    (void) reg;
    return 1;
}

static ggml_backend_dev_t tsg_reg_get_device(ggml_backend_reg_t reg, size_t index) {
    (void) index;
    return &((struct tsg_pager *) reg->context)->device;
}

static ggml_backend_t inner_backend(ggml_backend_t backend) {
    return ((ggml_backend_t *) backend->context)[0];  // struct tsg_backend starts with it
}

static void * inner_proc(ggml_backend_t backend, const char * name) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(ggml_backend_get_device(inner_backend(backend))), name);
}

// Without this the CPU inner device would run with its default number of threads: 35 ms a token instead of 11.5.
static void tsg_backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_set_n_threads_t set = (ggml_backend_set_n_threads_t) inner_proc(backend, "ggml_backend_set_n_threads");
    if (set) {
        set(inner_backend(backend), n_threads);
    }
}

static void tsg_backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    ggml_backend_set_abort_callback_t set = (ggml_backend_set_abort_callback_t) inner_proc(backend, "ggml_backend_set_abort_callback");
    if (set) {
        set(inner_backend(backend), callback, data);
    }
}

// Of a model on several devices that of the experts. Else none, and never one of the inner device's: experts must not be repacked.
static ggml_backend_buffer_type_t * tsg_device_get_extra_bufts(ggml_backend_dev_t dev) {
    return pager_of(dev)->offered;
}

static void * tsg_reg_get_proc_address(ggml_backend_reg_t reg, const char * name) {
    if (strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return (void *) tsg_backend_set_n_threads;
    }
    if (strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return (void *) tsg_backend_set_abort_callback;
    }
    if (strcmp(name, "ggml_backend_dev_get_extra_bufts") == 0 && ((struct tsg_pager *) reg->context)->group) {
        return (void *) tsg_device_get_extra_bufts;
    }
    return NULL;
}

void tsg_device_init(struct tsg_pager * pager) {
    struct ggml_backend_dev_props props;
    ggml_backend_dev_get_props(pager->inner, &props);
    pager->reg = (struct ggml_backend_reg) {
        .api_version = GGML_BACKEND_API_VERSION,
        .iface = {
            .get_name         = tsg_reg_get_name,
            .get_device_count = tsg_reg_get_device_count,
            .get_device       = tsg_reg_get_device,
            .get_proc_address = tsg_reg_get_proc_address,
        },
        .context = pager,
    };
    pager->device = (struct ggml_backend_device) {
        .iface = {
            .get_name             = tsg_device_get_name,
            .get_description      = tsg_device_get_description,
            .get_memory           = tsg_device_get_memory,
            .get_type             = tsg_device_get_type,
            .get_props            = tsg_device_get_props,
            .init_backend         = tsg_device_init_backend,
            .get_buffer_type      = tsg_device_get_buffer_type,
            .get_host_buffer_type = tsg_device_get_host_buffer_type,
            .supports_op          = tsg_device_supports_op,
            .supports_buft        = tsg_device_supports_buft,
            .offload_op           = tsg_device_offload_op,
            .event_new            = props.caps.events ? tsg_device_event_new : NULL,
            .event_free           = props.caps.events ? tsg_device_event_free : NULL,
            .event_synchronize    = props.caps.events ? tsg_device_event_synchronize : NULL,
        },
        .reg     = &pager->reg,
        .context = pager,
    };
}
