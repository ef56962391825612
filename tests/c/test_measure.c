// test_measure.c - what doctor measures, on the CPU device: figures where there is something to measure, zero where there is not, nothing left behind.
#include "check.h"

#include "ggml-cpu.h"
#include "tsg.h"

#include <sys/resource.h>

#define MIB ((size_t) 1 << 20)

static void * cpu(void) {
    return ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
}

static bool plausible(double bytes_per_second) {
    return bytes_per_second > 1e6 && bytes_per_second < 1e14;
}

static void copies(void) {
    CHECK(plausible(tsg_measure_copy(cpu(), true, false, MIB, 4)));
    CHECK(plausible(tsg_measure_copy(cpu(), false, false, MIB, 4)));
    CHECK(tsg_measure_copy(cpu(), true, true, MIB, 4) == 0);  // the CPU device has no page-locked memory of its own
    CHECK(plausible(tsg_measure_device_memory(cpu(), 4 * MIB, 2, 3)));
}

static void memory(void) {
    CHECK(plausible(tsg_measure_host_memory(8 * MIB, 1, 2)));
    CHECK(plausible(tsg_measure_host_memory(8 * MIB, 3, 2)));
    CHECK(tsg_measure_host_memory(MIB, 0, 1) == 0 && tsg_measure_host_memory(MIB, 1 << 20, 1) == 0);
}

static void experts(void) {
    struct tsg_experts_load load = { .type = GGML_TYPE_Q4_K, .ne0 = 256, .ne1 = 64, .n_expert = 8, .n_used = 2, .n_tokens = 1 };
    const double            one  = tsg_measure_experts(cpu(), &load, 1, 20);
    CHECK(one > 0 && one < 1);
    load.n_tokens = 512;
    CHECK(tsg_measure_experts(cpu(), &load, 1, 5) > one);  // 512 times the work
}

// mlock grants what RLIMIT_MEMLOCK says, and everything is given back each time.
static void lockable(void) {
    const struct rlimit limit = { .rlim_cur = 4 * MIB, .rlim_max = 4 * MIB };
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    const uint64_t root = getuid() == 0;  // is not limited
    for (int i = 0; i < 3; i++) {
        CHECK(tsg_measure_lockable(cpu(), 2 * MIB, MIB) == 2 * MIB);
        CHECK(tsg_measure_lockable(cpu(), 16 * MIB, MIB) == (root ? 16 * MIB : 4 * MIB));
    }
    CHECK(tsg_measure_lockable(cpu(), 0, MIB) == 0);
}

int main(int argc, char ** argv) {
    const struct test tests[] = { TEST(copies), TEST(memory), TEST(experts), TEST(lockable) };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
