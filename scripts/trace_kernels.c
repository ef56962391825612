// trace_kernels.c - for gpu-kernels: writes a line for every CUDA kernel of this process, also those in CUDA graphs: nanoseconds, a tab, the name.
#include <cupti.h>

#include <stdio.h>
#include <stdlib.h>

#define BUFFER_BYTES ((size_t) 8 << 20)

static FILE * out;  // CUPTI's callbacks have no user data

static void CUPTIAPI give_buffer(uint8_t ** buffer, size_t * size, size_t * max_records) {
    *buffer      = aligned_alloc(64, BUFFER_BYTES);
    *size        = BUFFER_BYTES;
    *max_records = 0;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t * buffer, size_t size, size_t valid) {
    (void) context, (void) stream, (void) size;
    CUpti_Activity * record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL && out) {
            const CUpti_ActivityKernel9 * kernel = (const CUpti_ActivityKernel9 *) record;  // later versions only append
            fprintf(out, "%llu\t%s\n", (unsigned long long) (kernel->end - kernel->start), kernel->name);
        }
    }
    free(buffer);
}

// 0, or a CUPTI error, or -1 if the file cannot be written.
int trace_start(const char * path) {
    out = fopen(path, "w");
    if (!out) {
        return -1;
    }
    const CUptiResult result = cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
    return (int) (result == CUPTI_SUCCESS ? cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) : result);
}

void trace_stop(void) {
    cuptiActivityFlushAll(1);
    cuptiActivityDisable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    fclose(out);
    out = NULL;
}
