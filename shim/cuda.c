#include "cuda.h"

#include "pager.h"

#include <dlfcn.h>
#include <stdlib.h>

extern const unsigned char tsg_resident_ptx[];  // resident.ptx, from CMake

bool tsg_cuda_ok(const struct tsg_cuda * cuda, tsg_cu_result result, const char * what) {
    if (result == 0) {
        return true;
    }
    const char * name = NULL;
    if (cuda->error_name) {
        cuda->error_name(result, &name);
    }
    tsg_fail(TSG_E_STATE, "CUDA: %s failed with %s", what, name ? name : "an unknown error");
    return false;
}

// A function of the driver. dlsym gives an object pointer; POSIX lets it be one of a function.
static bool find(struct tsg_cuda * cuda, const char * name, void * function) {
    *(void **) function = dlsym(cuda->library, name);
    if (!*(void **) function) {
        tsg_fail(TSG_E_STATE, "the CUDA driver has no %s: update the NVIDIA driver", name);
        return false;
    }
    return true;
}

struct symbol {
    const char * name;
    void *       function;
};

static bool find_all(struct tsg_cuda * cuda) {
    const struct symbol table[] = {
        { "cuInit", &cuda->init },
        { "cuDeviceGetByPCIBusId", &cuda->device_by_pci },
        { "cuDeviceGetAttribute", &cuda->device_attribute },
        { "cuDevicePrimaryCtxRetain", &cuda->context_retain },
        { "cuDevicePrimaryCtxRelease_v2", &cuda->context_release },
        { "cuCtxSetCurrent", &cuda->context_set },
        { "cuModuleLoadData", &cuda->module_load },
        { "cuModuleUnload", &cuda->module_unload },
        { "cuModuleGetFunction", &cuda->module_function },
        { "cuGetErrorName", &cuda->error_name },
        { "cuMemAlloc_v2", &cuda->memory_alloc },
        { "cuMemFree_v2", &cuda->memory_free },
        { "cuMemsetD8_v2", &cuda->memset_d8 },
        { "cuMemHostAlloc", &cuda->host_alloc },
        { "cuMemFreeHost", &cuda->host_free },
        { "cuMemHostRegister_v2", &cuda->host_register },
        { "cuMemHostUnregister", &cuda->host_unregister },
        { "cuMemHostGetDevicePointer_v2", &cuda->host_device_ptr },
        { "cuMemcpyHtoD_v2", &cuda->copy_to_device },
        { "cuMemcpyDtoH_v2", &cuda->copy_to_host },
        { "cuMemcpyHtoDAsync_v2", &cuda->copy_to_device_async },
        { "cuMemcpyDtoDAsync_v2", &cuda->copy_on_device_async },
        { "cuStreamCreate", &cuda->stream_create },
        { "cuStreamDestroy_v2", &cuda->stream_destroy },
        { "cuStreamSynchronize", &cuda->stream_synchronize },
        { "cuStreamWaitEvent", &cuda->stream_wait },
        { "cuStreamBeginCapture_v2", &cuda->stream_begin_capture },
        { "cuStreamEndCapture", &cuda->stream_end_capture },
        { "cuEventRecord", &cuda->event_record },
        { "cuEventQuery", &cuda->event_query },
        { "cuLaunchKernel", &cuda->launch },
        { "cuGraphInstantiateWithFlags", &cuda->graph_instantiate },
        { "cuGraphLaunch", &cuda->graph_launch },
        { "cuGraphDestroy", &cuda->graph_destroy },
        { "cuGraphExecDestroy", &cuda->exec_destroy },
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (!find(cuda, table[i].name, table[i].function)) {
            return false;
        }
    }
    return true;
}

static bool find_graph_editing(struct tsg_cuda * cuda) {
    const struct symbol table[] = {
        { "cuGraphGetNodes", &cuda->graph_nodes },
        { "cuGraphNodeGetType", &cuda->node_type },
        { "cuGraphNodeGetDependentNodes_v2", &cuda->node_dependents },
        { "cuGraphAddDependencies_v2", &cuda->add_dependencies },
        { "cuGraphRemoveDependencies_v2", &cuda->remove_dependencies },
        { "cuGraphKernelNodeGetParams_v2", &cuda->kernel_params },
        { "cuFuncGetName", &cuda->func_name },
        { "cuKernelGetName", &cuda->kernel_name },
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (!find(cuda, table[i].name, table[i].function)) {
            return false;
        }
    }
    return true;
}

static bool load_kernels(struct tsg_cuda * cuda, const char * pci_bus_id) {
    int major = 0;
    int minor = 0;
    if (!tsg_cuda_ok(cuda, cuda->init(0), "cuInit") || !tsg_cuda_ok(cuda, cuda->device_by_pci(&cuda->device, pci_bus_id), "cuDeviceGetByPCIBusId") ||
        !tsg_cuda_ok(cuda, cuda->device_attribute(&major, TSG_CU_ATTRIBUTE_CC_MAJOR, cuda->device), "cuDeviceGetAttribute") ||
        !tsg_cuda_ok(cuda, cuda->device_attribute(&minor, TSG_CU_ATTRIBUTE_CC_MINOR, cuda->device), "cuDeviceGetAttribute")) {
        return false;
    }
    if (major * 10 + minor < 75) {
        tsg_fail(TSG_E_STATE, "compute capability %d.%d is below 7.5", major, minor);
        return false;
    }
    return tsg_cuda_ok(cuda, cuda->context_retain(&cuda->context, cuda->device), "cuDevicePrimaryCtxRetain") && tsg_cuda_enter(cuda) &&
           tsg_cuda_ok(cuda, cuda->module_load(&cuda->module, tsg_resident_ptx), "cuModuleLoadData") &&
           tsg_cuda_ok(cuda, cuda->module_function(&cuda->step, cuda->module, "tsg_step"), "cuModuleGetFunction") &&
           tsg_cuda_ok(cuda, cuda->module_function(&cuda->rest, cuda->module, "tsg_rest"), "cuModuleGetFunction") &&
           tsg_cuda_ok(cuda, cuda->module_function(&cuda->commit, cuda->module, "tsg_commit"), "cuModuleGetFunction") &&
           tsg_cuda_ok(cuda, cuda->module_function(&cuda->stamp, cuda->module, "tsg_stamp"), "cuModuleGetFunction") &&
           tsg_cuda_ok(cuda, cuda->module_function(&cuda->stage, cuda->module, "tsg_stage"), "cuModuleGetFunction") &&
           tsg_cuda_ok(cuda, cuda->module_function(&cuda->mark, cuda->module, "tsg_mark"), "cuModuleGetFunction") &&
           tsg_cuda_ok(cuda, cuda->module_function(&cuda->delay, cuda->module, "tsg_delay"), "cuModuleGetFunction");
}

struct tsg_cuda * tsg_cuda_open(const char * pci_bus_id) {
    struct tsg_cuda * cuda = calloc(1, sizeof(struct tsg_cuda));
    if (!cuda) {
        tsg_fail(TSG_E_MEMORY, "no memory for the CUDA driver's table");
        return NULL;
    }
    cuda->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!cuda->library) {
        tsg_fail(TSG_E_STATE, "there is no CUDA driver (libcuda.so.1)");
    }
    if (!cuda->library || !find_all(cuda) || !load_kernels(cuda, pci_bus_id)) {
        tsg_cuda_close(cuda);
        return NULL;
    }
    find(cuda, "cuGraphExecUpdate_v2", &cuda->exec_update);
    cuda->can_edit = find_graph_editing(cuda);
    return cuda;
}

bool tsg_cuda_enter(struct tsg_cuda * cuda) {
    return tsg_cuda_ok(cuda, cuda->context_set(cuda->context), "cuCtxSetCurrent");
}

void tsg_cuda_close(struct tsg_cuda * cuda) {
    if (!cuda) {
        return;
    }
    if (cuda->module) {
        cuda->context_set(cuda->context);
        cuda->module_unload(cuda->module);
    }
    if (cuda->context) {
        cuda->context_release(cuda->device);
    }
    if (cuda->library) {
        dlclose(cuda->library);
    }
    free(cuda);
}
