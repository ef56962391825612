// cuda.h - the part of the CUDA driver API that the shim calls, found at run time: the same library loads where there is no CUDA.
//
// Types and values from cuda.h of the CUDA toolkit; handles are opaque here. CUDA streams and events of the runtime API, which ggml-cuda uses, are the
// driver's own.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int       tsg_cu_result;  // 0 = success
typedef int       tsg_cu_device;
typedef uint64_t  tsg_cu_ptr;
typedef void *    tsg_cu_stream;
typedef void *    tsg_cu_event;
typedef void *    tsg_cu_graph;
typedef void *    tsg_cu_exec;
typedef void *    tsg_cu_func;
typedef void *    tsg_cu_node;

struct tsg_cu_edge {  // CUgraphEdgeData
    unsigned char data[8];
};

struct tsg_cu_update {  // CUgraphExecUpdateResultInfo
    int         result;
    tsg_cu_node node;
    tsg_cu_node from;
};

enum {
    TSG_CU_STREAM_NON_BLOCKING   = 1,
    TSG_CU_EVENT_DISABLE_TIMING  = 2,
    TSG_CU_CAPTURE_RELAXED       = 2,
    TSG_CU_HOST_ALLOC_MAPPED     = 3,    // portable | device map
    TSG_CU_REGISTER_READ_ONLY    = 0xb,  // portable | device map | read only
    TSG_CU_ATTRIBUTE_CC_MAJOR    = 75,
    TSG_CU_ATTRIBUTE_CC_MINOR    = 76,
};

// One device: its primary context, which ggml-cuda uses too, and our kernels in it.
struct tsg_cuda {
    void *      library;
    tsg_cu_device device;
    void *      context;
    void *      module;
    tsg_cu_func step;
    tsg_cu_func rest;
    tsg_cu_func commit;
    tsg_cu_func stamp;
    tsg_cu_func stage;
    tsg_cu_func mark;
    tsg_cu_func delay;

    tsg_cu_result (*init)(unsigned flags);
    tsg_cu_result (*device_by_pci)(tsg_cu_device * device, const char * bus_id);
    tsg_cu_result (*device_attribute)(int * value, int attribute, tsg_cu_device device);
    tsg_cu_result (*context_retain)(void ** context, tsg_cu_device device);
    tsg_cu_result (*context_release)(tsg_cu_device device);
    tsg_cu_result (*context_set)(void * context);
    tsg_cu_result (*module_load)(void ** module, const void * image);
    tsg_cu_result (*module_unload)(void * module);
    tsg_cu_result (*module_function)(tsg_cu_func * function, void * module, const char * name);
    tsg_cu_result (*error_name)(tsg_cu_result error, const char ** name);
    tsg_cu_result (*memory_alloc)(tsg_cu_ptr * ptr, size_t size);
    tsg_cu_result (*memory_free)(tsg_cu_ptr ptr);
    tsg_cu_result (*memset_d8)(tsg_cu_ptr ptr, unsigned char value, size_t size);
    tsg_cu_result (*host_alloc)(void ** ptr, size_t size, unsigned flags);
    tsg_cu_result (*host_free)(void * ptr);
    tsg_cu_result (*host_register)(void * ptr, size_t size, unsigned flags);
    tsg_cu_result (*host_unregister)(void * ptr);
    tsg_cu_result (*host_device_ptr)(tsg_cu_ptr * device, void * host, unsigned flags);
    tsg_cu_result (*copy_to_device)(tsg_cu_ptr to, const void * from, size_t size);
    tsg_cu_result (*copy_to_host)(void * to, tsg_cu_ptr from, size_t size);
    tsg_cu_result (*copy_to_device_async)(tsg_cu_ptr to, const void * from, size_t size, tsg_cu_stream stream);
    tsg_cu_result (*copy_on_device_async)(tsg_cu_ptr to, tsg_cu_ptr from, size_t size, tsg_cu_stream stream);
    tsg_cu_result (*stream_create)(tsg_cu_stream * stream, unsigned flags);
    tsg_cu_result (*stream_destroy)(tsg_cu_stream stream);
    tsg_cu_result (*stream_synchronize)(tsg_cu_stream stream);
    tsg_cu_result (*stream_wait)(tsg_cu_stream stream, tsg_cu_event event, unsigned flags);
    tsg_cu_result (*stream_begin_capture)(tsg_cu_stream stream, int mode);
    tsg_cu_result (*stream_end_capture)(tsg_cu_stream stream, tsg_cu_graph * graph);
    tsg_cu_result (*event_record)(tsg_cu_event event, tsg_cu_stream stream);
    tsg_cu_result (*event_query)(tsg_cu_event event);  // not 0: not there yet
    tsg_cu_result (*launch)(tsg_cu_func function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                            tsg_cu_stream stream, void ** params, void ** extra);
    tsg_cu_result (*graph_instantiate)(tsg_cu_exec * exec, tsg_cu_graph graph, unsigned long long flags);
    tsg_cu_result (*graph_launch)(tsg_cu_exec exec, tsg_cu_stream stream);
    tsg_cu_result (*graph_destroy)(tsg_cu_graph graph);
    tsg_cu_result (*exec_destroy)(tsg_cu_exec exec);

    tsg_cu_result (*exec_update)(tsg_cu_exec exec, tsg_cu_graph graph, struct tsg_cu_update * info);  // CUDA 12 and up, else NULL

    // CUDA 12.3 and up, for edges.c; can_edit tells whether all are there
    bool can_edit;
    tsg_cu_result (*graph_nodes)(tsg_cu_graph graph, tsg_cu_node * nodes, size_t * n);
    tsg_cu_result (*node_type)(tsg_cu_node node, int * type);
    tsg_cu_result (*node_dependents)(tsg_cu_node node, tsg_cu_node * nodes, struct tsg_cu_edge * edges, size_t * n);
    tsg_cu_result (*add_dependencies)(tsg_cu_graph graph, const tsg_cu_node * from, const tsg_cu_node * to, const struct tsg_cu_edge * edges, size_t n);
    tsg_cu_result (*remove_dependencies)(tsg_cu_graph graph, const tsg_cu_node * from, const tsg_cu_node * to, const struct tsg_cu_edge * edges, size_t n);
    tsg_cu_result (*kernel_params)(tsg_cu_node node, void * params);
    tsg_cu_result (*func_name)(const char ** name, tsg_cu_func function);
    tsg_cu_result (*kernel_name)(const char ** name, void * kernel);
};

// Opens the driver for the device with this PCI bus id and loads our kernels. NULL, and why in tsg_last_error(), if that is not possible.
struct tsg_cuda * tsg_cuda_open(const char * pci_bus_id);
void              tsg_cuda_close(struct tsg_cuda * cuda);
bool              tsg_cuda_enter(struct tsg_cuda * cuda);  // makes the context current on this thread

// False, and the call and the error's name in tsg_last_error(), unless `result` is success.
bool tsg_cuda_ok(const struct tsg_cuda * cuda, tsg_cu_result result, const char * what);

// Moves the waits for our kernels in a captured graph behind the quantisation of the activations. Returns how many were moved.
int tsg_edges_relax(const struct tsg_cuda * cuda, tsg_cu_graph graph);
