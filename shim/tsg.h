// tsg.h - the C API of the shim: expert paging for llama.cpp models through a proxy ggml device.
//
// Python reads this very file with cffi (ABI mode), so it is the only declaration of the API: below the line CDEF it holds nothing but plain C
// declarations, no preprocessor line, up to END. Everything hangs off one handle per model, the pager. Functions that can fail return an enum tsg_status;
// tsg_last_error() then gives the calling thread one line that says what is wrong. Functions are safe to call from any thread; those that read or
// change slots wait for a running graph of the same pager.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
// CDEF
enum tsg_status {
    TSG_OK         = 0,
    TSG_E_ARGUMENT = 1,  // the caller passed something impossible
    TSG_E_MEMORY   = 2,  // an allocation on the host or on the device failed
    TSG_E_STATE    = 3,  // not possible now (before commit, after commit, everything pinned)
    TSG_E_ABI      = 4,  // the loaded llama.cpp is not the one this library was built for
    TSG_E_FILE     = 5,  // the file cannot be read, or is not what its header says
    TSG_E_STOPPED  = 6,  // the progress callback asked to stop
};

enum tsg_policy {
    TSG_POLICY_LFRU = 0,  // decayed frequency over age
    TSG_POLICY_LRU  = 1,  // last use
    TSG_POLICY_SLRU = 2,  // probation and protected segment, then last use
    TSG_POLICY_LFU  = 3,  // decayed frequency
    TSG_POLICY_FIFO = 4,  // time of load
};

enum tsg_phase {
    TSG_PREFILL = 0,  // a graph of more than TSG_DECODE_TOKENS tokens
    TSG_DECODE  = 1,
};

enum tsg_engine_kind {
    TSG_ENGINE_AUTO   = 0,  // device-resident where it can be, else host-driven
    TSG_ENGINE_HOST   = 1,  // the host reads the router's choice once a layer; any device
    TSG_ENGINE_DEVICE = 2,  // the device does, in one CUDA graph per token; an error where it cannot
};

// What happens to a miss of decode.
enum tsg_miss_mode {
    TSG_MISS_FETCH = 0,  // it is copied into a slot, and the device waits for it
    TSG_MISS_CPU   = 1,  // the CPU computes it where it lies
    TSG_MISS_SPLIT = 2,  // some are fetched and the CPU computes the others, so that both finish together
    TSG_MISS_LAYERS = 3, // as llama.cpp's --n-cpu-moe: the last layers have all their experts on the device, the CPU computes those of the first
};

// How the device reads experts that are in no slot. What a rung cannot do the next one does.
enum tsg_host_rung {
    TSG_HOST_NONE     = 0,  // not loaded
    TSG_HOST_MAPPED   = 1,  // the file's own pages, registered with the driver; on the CPU as they are
    TSG_HOST_PINNED   = 2,  // page-locked copies
    TSG_HOST_PAGEABLE = 3,  // the file's own pages, through page-locked staging where there is some; host-driven engine only
};

enum tsg_limits {
    TSG_DECODE_TOKENS = 8,    // a graph of up to so many tokens counts as decode
    TSG_MAX_PARTS     = 4,    // weights of one expert: gate, up, down, or gate_up and down
    TSG_MAX_EXPERTS   = 4096, // experts of one layer
    TSG_MAX_STAGES    = 2,    // prefill stages of a pool
};

// One weight of an expert layer, for all its experts. Names are those of the GGUF.
struct tsg_part {
    const char * weight;  // "blk.3.ffn_gate_exps.weight", [ne0, ne1, n_expert]
    const char * bias;    // per-expert bias, [ne1, n_expert] F32, or NULL
    const char * scale;   // per-expert scale, [n_expert] F32, or NULL
    const float * bias_data;   // its values, [n_expert][ne1]; copied
    const float * scale_data;  // its values, [n_expert]; copied
    int32_t      type;    // enum ggml_type of the weight
    int64_t      ne0;     // columns (input features)
    int64_t      ne1;     // rows (output features)
    int32_t      shard;   // which file, in the order of tsg_pager_add_file()
    uint64_t     offset;  // of its first byte there
};

// Counters since the pager was made or tsg_pager_reset_stats(). A lookup is one distinct expert of one layer in one graph; in a pool that holds all
// its experts nobody reads the router's ids, and a lookup is one routed expert of one token.
struct tsg_counts {
    uint64_t lookups;
    uint64_t hits;         // of these, resident when the layer asked
    uint64_t misses;       // of these, moved over the link or computed by the CPU; hits + misses == lookups
    uint64_t evictions;    // experts that lost their slot
    uint64_t bytes_link;   // host to device
    uint64_t bytes_device; // device to device: resident experts copied into the prefill stage
    uint64_t streamed;     // layer steps that went through the prefill stage
    uint64_t graphs;
    uint64_t cpu_rows;     // pairs of a token and an expert that the CPU computed
    uint64_t admitted;     // misses computed by the CPU that then entered the pool in the background
};

// How the engine ran.
struct tsg_notes {
    uint64_t captures;        // CUDA graphs made
    uint64_t replays;         // graphs that were one launch
    uint64_t capture_failed;  // contexts that fell back to issuing graphs piece by piece
    uint64_t edges_moved;     // waits in them that were moved behind the quantisation of the activations
    uint64_t overlapped;      // prefill graphs whose copies ran beside the computation
    uint64_t host_ns;         // time in the shim on the calling thread, decode
    uint64_t cpu_ns;          // time that the CPU computed misses
    uint64_t wait_cpu_ns;     // of the calling thread for the CPU, while the device may have been idle
    uint64_t wait_device_ns;  // of the calling thread for the device, while the CPU had nothing to do
};

struct tsg_stats {
    struct tsg_counts phase[2];  // [enum tsg_phase]
    uint64_t host_bytes;         // expert bytes in the host pool
    uint64_t host_tensors;
    enum tsg_host_rung host_rung;
    uint64_t pool_bytes;         // device memory of the slots
    uint64_t stage_bytes;        // device memory of the prefill stages
    int64_t  slots_total;
    int64_t  slots_used;
    struct tsg_notes notes;
    bool     device_engine;      // decode is device-resident
    bool     cpu_cannot;         // the CPU cannot compute the misses of this model; tsg_pager_miss() says why
    bool     all_resident;       // every pool holds all its experts: nothing ever moves
};

// Stretches of a layer's time in decode, one after the other.
enum tsg_stretch {
    TSG_ATTENTION = 0,  // from the experts of the layer before to the router's choice: attention, norms, shared experts
    TSG_LOOKUP    = 1,  // which of the chosen are resident, who leaves
    TSG_COPY      = 2,  // until the last byte is there. On the device engine the first matmul runs meanwhile
    TSG_EXPERTS   = 3,  // the rest of the expert matmuls
};

struct tsg_layer_time {
    uint64_t graphs;
    uint64_t ns[4];  // [enum tsg_stretch] sums over these graphs
};

// What to do with misses. Of those that the CPU computes one enters the pool if decode wants it more than the one that would leave.
struct tsg_miss {
    enum tsg_miss_mode mode;
    int32_t            every;      // and at most one in so many; 0 = none
    double             link_rate;  // split: bytes per second over the link,
    double             cpu_rate;   // and of experts that the CPU computes; 0 = measured over the first layers
};

struct tsg_expert {
    int32_t  slot;      // slot in its pool, -1 = only in host memory
    bool     pinned;
    uint64_t hits;      // lookups that found it resident
    uint64_t misses;    // lookups that did not
    uint64_t uses;      // of both, those of decode
    uint64_t last_use;  // graph number of its last decode use, 0 = never
};

// Every expert at one moment.
struct tsg_map {
    uint64_t tick;         // graphs that looked experts up in slots so far, as in tsg_expert.last_use
    int64_t  slots_total;
    int64_t  slots_used;
    struct tsg_counts phase[2];  // [enum tsg_phase]
    bool     all_resident;
};

// What a change of the pools' size did.
struct tsg_resized {
    int64_t  kept;        // experts that were resident and are
    int64_t  evicted;     // that were, and are not
    int64_t  loaded;      // that came over the link: what a pool that holds everything lacked, or all of `kept`, if there was no room for
    bool     beside;      // the new pools beside the old ones
    uint64_t bytes_link;
};

struct tsg_device {
    const char * name;
    const char * description;
    uint64_t     memory_free;   // bytes
    uint64_t     memory_total;
    bool         is_cpu;
};

// A matmul with experts, as MUL_MAT_ID does it: every token uses `n_used` of them.
struct tsg_experts_load {
    int32_t type;  // enum ggml_type of the weights, which are zeros
    int64_t ne0;
    int64_t ne1;
    int64_t n_expert;
    int64_t n_used;
    int64_t n_tokens;
};

struct tsg_pager;

const char * tsg_last_error(void);

// ABI guard: status and, in tsg_last_error(), what does not match. Call before anything else. `ggml_version` is the address of that function in the
// libraries that llama.cpp runs on: another address here would mean two copies of ggml in one process.
enum tsg_status tsg_abi_check(const void * ggml_version, size_t sizeof_model_params, size_t sizeof_context_params);
const char *    tsg_ggml_version(void);  // the version this library was compiled against

// Facts of a ggml device (a ggml_backend_dev_t), and whether it multiplies expert weights of this type and shape.
void tsg_device_get(void * device, struct tsg_device * out);
// Host to device bytes per second, from page-locked memory where the device has it, over `repeats` copies of `size` bytes; 0 if memory is short.
double tsg_device_link_rate(void * device, size_t size, int32_t repeats);
// Measurements. Rates in bytes per second; 0 if memory is short or the device cannot. Pinned memory is 0 too where the device has none.
double   tsg_measure_copy(void * device, bool to_device, bool pinned, size_t size, int32_t repeats);
double   tsg_measure_device_memory(void * device, size_t size, int32_t n_threads, int32_t repeats);  // read and written by a copy
double   tsg_measure_host_memory(size_t size, int32_t n_threads, int32_t repeats);                   // read
double   tsg_measure_experts(void * device, const struct tsg_experts_load * load, int32_t n_threads, int32_t repeats);  // seconds of one matmul
// Bytes that can be page-locked now, in pieces, `most` at most; by the device, or by mlock where it has no such memory. All is given back.
uint64_t tsg_measure_lockable(void * device, uint64_t most, size_t piece);
bool tsg_device_supports(void * device, int32_t type, int64_t ne0, int64_t ne1, int64_t n_expert, int64_t n_used);

// Life of a pager: new, add files, pools and layers, commit (allocates the slots), hand device and buffer type to llama_model_load_from_file, ready
// (every byte of the experts was offered; maps them, page-locks them and fills the pools that hold everything), use, free. `progress`, or NULL, hears
// 0 to 1 and returns false to stop. Free releases the caller's hold; the last buffer or backend of the model releases the rest.
enum tsg_status tsg_pager_new(void * inner_device, enum tsg_policy policy, enum tsg_engine_kind engine, struct tsg_pager ** out);
enum tsg_status tsg_pager_add_file(struct tsg_pager * pager, const char * path);
enum tsg_status tsg_pager_add_pool(struct tsg_pager * pager, int64_t n_slots, int32_t n_stages, int32_t * pool);
enum tsg_status tsg_pager_add_layer(struct tsg_pager * pager, int32_t pool, int32_t n_expert, int32_t n_used,
                                    const struct tsg_part * parts, int32_t n_parts, int32_t * layer);
enum tsg_status tsg_pager_set_host_limit(struct tsg_pager * pager, uint64_t bytes);  // page-locked at most, before ready; 0 = what there is
enum tsg_status tsg_pager_commit(struct tsg_pager * pager);
enum tsg_status tsg_pager_ready(struct tsg_pager * pager, bool (*progress)(float fraction, void * data), void * data);
void            tsg_pager_free(struct tsg_pager * pager);

// Misses on the CPU: it joins before commit, with threads of its own; what it does may change at any time once the pager is ready.
enum tsg_status tsg_pager_use_cpu(struct tsg_pager * pager, void * cpu_device, int32_t n_threads);
enum tsg_status tsg_pager_set_miss(struct tsg_pager * pager, const struct tsg_miss * miss);
const char *    tsg_pager_miss(struct tsg_pager * pager);  // what happens to misses and why, for people; valid until the thread asks again
// Seconds that the CPU needs with so many threads for one expert out of the host pool, measured now, in some milliseconds; 0 if it cannot be.
double          tsg_pager_cpu_seconds(struct tsg_pager * pager, void * cpu_device, int32_t n_threads);

void * tsg_pager_device(struct tsg_pager * pager);       // ggml_backend_dev_t for llama_model_params.devices
void * tsg_pager_buffer_type(struct tsg_pager * pager);  // ggml_backend_buffer_type_t for tensor_buft_overrides

void            tsg_pager_stats(struct tsg_pager * pager, struct tsg_stats * out);
void            tsg_pager_reset_stats(struct tsg_pager * pager);
const char *    tsg_pager_engine(struct tsg_pager * pager);  // which engine runs and why, for people; valid until the thread asks again
const char *    tsg_pager_host(struct tsg_pager * pager);    // which rung of the host pool holds and why, likewise
enum tsg_status tsg_pager_set_link(struct tsg_pager * pager, double bytes_per_second);  // slows the link down (device engine only); 0 = the real one
enum tsg_status tsg_pager_set_policy(struct tsg_pager * pager, enum tsg_policy policy);
enum tsg_status tsg_pager_check_integrity(struct tsg_pager * pager);

// Takes the time of every layer of every decode graph, from zero; or no longer. The engine stays what it is; the host-driven one waits between the
// stretches. A layer all of whose experts stay on the device has no stretches of its own: its time counts as the next one's attention. `layer` n_layers stands for
// what follows the last layer, in TSG_ATTENTION.
enum tsg_status tsg_pager_set_profile(struct tsg_pager * pager, bool on);
enum tsg_status tsg_pager_layer_time(struct tsg_pager * pager, int32_t layer, struct tsg_layer_time * out);

// Another number of slots for every pool, `n_slots`[n_pools] in the order they were added, between two graphs of any stream. Experts that are resident stay
// so, as far as there is room, in the order of the policy; pinned ones in any case. Counters go on. Captured graphs are made anew. If the device has no room
// for old and new pools at once, the old ones go first and the experts that stay are read from the host again. TSG_E_ARGUMENT or TSG_E_STATE for a size below
// what one token needs beside the pinned, TSG_E_MEMORY for one that does not fit: then nothing changed, or, if the message says so, everything is lost.
enum tsg_status tsg_pager_resize(struct tsg_pager * pager, const int64_t * n_slots, struct tsg_resized * out);

// All experts of all layers in the order these were added, [sum of n_expert] each. It waits for the graph that runs; on the device engine it copies the
// slot maps, which stay where they are.
enum tsg_status tsg_pager_map(struct tsg_pager * pager, struct tsg_map * out, uint8_t * resident, uint64_t * hits, uint64_t * misses, uint64_t * last_use);

// One expert. `layer` is what tsg_pager_add_layer gave, `part` the index in its parts.
enum tsg_status tsg_expert_get(struct tsg_pager * pager, int32_t layer, int32_t expert, struct tsg_expert * out);
enum tsg_status tsg_expert_get_layer(struct tsg_pager * pager, int32_t layer, struct tsg_expert * out);  // out: [n_expert]
enum tsg_status tsg_expert_host(struct tsg_pager * pager, int32_t layer, int32_t expert, int32_t part, const void ** data, size_t * size);
enum tsg_status tsg_expert_read_slot(struct tsg_pager * pager, int32_t layer, int32_t expert, int32_t part, void * data, size_t size);
enum tsg_status tsg_expert_pin(struct tsg_pager * pager, int32_t layer, int32_t expert, bool pin);  // pin loads it first
enum tsg_status tsg_expert_prefetch(struct tsg_pager * pager, int32_t layer, int32_t expert);
enum tsg_status tsg_expert_evict(struct tsg_pager * pager, int32_t layer, int32_t expert);
// The same into a slot that is free, if there is one: nobody leaves, nothing is counted. *loaded says whether there was.
enum tsg_status tsg_expert_preload(struct tsg_pager * pager, int32_t layer, int32_t expert, bool * loaded);
// END
#pragma GCC visibility pop
