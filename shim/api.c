// api.c - errors, the ABI guard and devices.
#include "pager.h"

#include "llama.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

// ---- errors ----

static _Thread_local char last_error[512];

const char * tsg_last_error(void) {
    return last_error;
}

enum tsg_status tsg_fail(enum tsg_status status, const char * format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof(last_error), format, args);
    va_end(args);
    return status;
}

// ---- ABI guard ----

const char * tsg_ggml_version(void) {
    return TSG_GGML_VERSION;
}

enum tsg_status tsg_abi_check(const void * version, size_t sizeof_model_params, size_t sizeof_context_params) {
    if (version != (const void *) ggml_version) {
        return tsg_fail(TSG_E_ABI, "two copies of ggml are loaded in this process");
    }
    if (strcmp(ggml_version(), TSG_GGML_VERSION) != 0) {
        return tsg_fail(TSG_E_ABI, "the shim was built for ggml %s, this llama.cpp brings ggml %s", TSG_GGML_VERSION, ggml_version());
    }
    if (sizeof_model_params != sizeof(struct llama_model_params) || sizeof_context_params != sizeof(struct llama_context_params)) {
        return tsg_fail(TSG_E_ABI,
                        "llama.h and llama-cpp-python disagree: llama_model_params has %zu bytes here and %zu there, llama_context_params %zu and %zu",
                        sizeof(struct llama_model_params), sizeof_model_params, sizeof(struct llama_context_params), sizeof_context_params);
    }
    return TSG_OK;
}

// ---- devices ----

void tsg_device_get(void * device, struct tsg_device * out) {
    size_t free_bytes = 0, total = 0;
    ggml_backend_dev_memory(device, &free_bytes, &total);
    *out = (struct tsg_device) {
        .name         = ggml_backend_dev_name(device),
        .description  = ggml_backend_dev_description(device),
        .memory_free  = free_bytes,
        .memory_total = total,
        .is_cpu       = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU,
    };
}

bool tsg_device_supports(void * device, int32_t type, int64_t ne0, int64_t ne1, int64_t n_expert, int64_t n_used) {
    struct ggml_context * ctx = ggml_init((struct ggml_init_params) { .mem_size = ggml_tensor_overhead() * 8, .no_alloc = true });
    struct ggml_tensor *  w   = ggml_new_tensor_3d(ctx, (enum ggml_type) type, ne0, ne1, n_expert);
    struct ggml_tensor *  x   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, ne0, 1, 1);
    struct ggml_tensor *  ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, 1);
    const bool            yes = ggml_backend_dev_supports_op(device, ggml_mul_mat_id(ctx, w, x, ids));
    ggml_free(ctx);
    return yes;
}

static double seconds_now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

double tsg_device_link_rate(void * device, size_t size, int32_t repeats) {
    ggml_backend_buffer_type_t host_type = ggml_backend_dev_host_buffer_type(device);
    struct ggml_context *      ctx = ggml_init((struct ggml_init_params) { .mem_size = 2 * ggml_tensor_overhead(), .no_alloc = true });
    struct ggml_tensor *       to  = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (int64_t) size);
    ggml_backend_t             stream = ggml_backend_dev_init(device, NULL);
    ggml_backend_buffer_t      memory = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(device));
    ggml_backend_buffer_t      host   = ggml_backend_buft_alloc_buffer(host_type ? host_type : ggml_backend_cpu_buffer_type(), size);
    double                     rate   = 0;
    if (stream && memory && host) {
        memset(ggml_backend_buffer_get_base(host), 1, size);
        double start = 0;
        for (int32_t i = -1; i < repeats; i++) {  // the first copy warms up
            ggml_backend_tensor_set_async(stream, to, ggml_backend_buffer_get_base(host), 0, size);
            if (i < 0) {
                ggml_backend_synchronize(stream);
                start = seconds_now();
            }
        }
        ggml_backend_synchronize(stream);
        rate = (double) size * repeats / (seconds_now() - start);
    }
    ggml_backend_buffer_free(host);
    ggml_backend_buffer_free(memory);
    ggml_backend_free(stream);
    ggml_free(ctx);
    return rate;
}
