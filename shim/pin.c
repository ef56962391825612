// pin.c - page-locking for the inner device: the CUDA driver registers what lies in memory already, ggml's host buffer type allocates.
#include "cuda.h"
#include "pager.h"

#include <stdio.h>
#include <string.h>

struct tsg_cuda * tsg_pager_cuda(struct tsg_pager * pager) {
    struct ggml_backend_dev_props props;
    if (pager->cuda) {
        return pager->cuda;
    }
    ggml_backend_dev_get_props(pager->inner, &props);
    if (strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(pager->inner)), "CUDA") != 0 || !props.device_id) {
        tsg_fail(TSG_E_STATE, "%s is no CUDA device", ggml_backend_dev_name(pager->inner));
        return NULL;
    }
    // ggml-cuda can play several devices on one GPU (GGML_CUDA_DEVICES): their ids go on with "-v0"
    char id[32];
    snprintf(id, sizeof(id), "%.*s", (int) strcspn(props.device_id, "-"), props.device_id);
    pager->cuda = tsg_cuda_open(id);
    return pager->cuda;
}

// ---- registering ----

static bool register_range(struct tsg_pager * pager, void * base, size_t size) {
    struct tsg_cuda * cuda = tsg_pager_cuda(pager);
    return cuda && tsg_cuda_enter(cuda) && tsg_cuda_ok(cuda, cuda->host_register(base, size, TSG_CU_REGISTER_READ_ONLY), "cuMemHostRegister");
}

static void unregister_range(struct tsg_pager * pager, void * base) {
    if (tsg_cuda_enter(pager->cuda)) {
        tsg_cuda_ok(pager->cuda, pager->cuda->host_unregister(base), "cuMemHostUnregister");
    }
}

static const void * device_pointer(struct tsg_pager * pager, const void * host) {
    tsg_cu_ptr device = 0;
    return tsg_cuda_ok(pager->cuda, pager->cuda->host_device_ptr(&device, (void *) host, 0), "cuMemHostGetDevicePointer") ? (const void *) device : NULL;
}

// ---- allocating ----

static void * alloc_pinned(struct tsg_pager * pager, size_t size, void ** handle) {
    bool                  pinned = false;
    ggml_backend_buffer_t buffer = ggml_backend_dev_host_buffer_type(pager->inner) ? tsg_host_alloc(pager, size, &pinned) : NULL;
    if (!pinned) {
        ggml_backend_buffer_free(buffer);
        tsg_fail(TSG_E_MEMORY, "%s grants no more page-locked memory", ggml_backend_dev_name(pager->inner));
        return NULL;
    }
    *handle = buffer;
    return ggml_backend_buffer_get_base(buffer);
}

static void free_pinned(struct tsg_pager * pager, void * handle) {
    (void) pager;
    ggml_backend_buffer_free(handle);
}

// The first number behind `key` in a file of the kernel's, times `unit`; UINT64_MAX if there is none.
static uint64_t number_in(const char * path, const char * key, uint64_t unit) {
    FILE *             file  = fopen(path, "r");
    unsigned long long value = UINT64_MAX;
    char               line[128];
    while (file && fgets(line, sizeof(line), file)) {
        if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%llu", &value) == 1) {
            break;
        }
    }
    if (file) {
        fclose(file);
    }
    return value == UINT64_MAX ? value : value * unit;
}

// Locked memory is lost for everybody else, and the kernel would kill rather than refuse: leave a tenth.
static uint64_t available(struct tsg_pager * pager) {
    (void) pager;
    const uint64_t machine = number_in("/proc/meminfo", "MemAvailable:", 1024), group = number_in("/sys/fs/cgroup/memory.max", "", 1);
    return (machine < group ? machine : group) / 10 * 9;
}

static const struct tsg_pin_ops cuda_ops = { register_range, unregister_range, device_pointer, alloc_pinned, free_pinned, available };
static const struct tsg_pin_ops ggml_ops = { .alloc_pinned = alloc_pinned, .free_pinned = free_pinned, .available = available };

const struct tsg_pin_ops * tsg_pin_ops_of(struct tsg_pager * pager) {
    if (pager->inner_is_cpu) {
        return NULL;
    }
    return strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(pager->inner)), "CUDA") == 0 ? &cuda_ops : &ggml_ops;
}
