// test_group.c - a model on several devices: what pagers share and what they do not, where the loader and the scheduler are told to go.
#include "rig.h"

static const struct spec small = { .type = GGML_TYPE_Q8_0, .tables = true, .n_layers = 4, .n_expert = { 8, 8, 8, 8 }, .n_used = 2, .n_slots = 6 };

// ---- devices that are not the CPU, with what the CPU lacks ----

static struct {
    struct ggml_backend_device device[TSG_MAX_DEVICES + 1];
    uint64_t                   available;
    int                        n_copies, n_records, n_waits, n_events;
    ggml_backend_t             from, to;  // of the last copy
} fake;

static bool fake_cpy_tensor_async(ggml_backend_t from, ggml_backend_t to, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    fake.n_copies++;
    fake.from = from;
    fake.to   = to;
    memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

static void fake_event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    CHECK(backend->device == event->device);
    fake.n_records++;
}

static void fake_event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    (void) backend, (void) event;
    fake.n_waits++;
}

static ggml_backend_t fake_init_backend(ggml_backend_dev_t dev, const char * params) {
    (void) params;
    ggml_backend_t backend          = ggml_backend_cpu_init();
    backend->device                 = dev;
    backend->iface.cpy_tensor_async = fake_cpy_tensor_async;
    backend->iface.event_record     = fake_event_record;
    backend->iface.event_wait       = fake_event_wait;
    return backend;
}

static ggml_backend_event_t fake_event_new(ggml_backend_dev_t dev) {
    ggml_backend_event_t event = calloc(1, sizeof(struct ggml_backend_event));
    event->device              = dev;
    fake.n_events++;
    return event;
}

static void fake_event_free(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    (void) dev;
    fake.n_events--;
    free(event);
}

static void fake_event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    CHECK(dev == event->device);
}

static enum ggml_backend_dev_type fake_get_type(ggml_backend_dev_t dev) {
    (void) dev;
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void fake_get_props(ggml_backend_dev_t dev, struct ggml_backend_dev_props * props) {
    ggml_backend_dev_t cpu = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    (void) dev;
    cpu->iface.get_props(cpu, props);
    props->caps.async = props->caps.events = true;
}

static ggml_backend_dev_t fake_device(int i) {
    ggml_backend_dev_t device       = &fake.device[i];
    *device                         = *ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    device->iface.init_backend      = fake_init_backend;
    device->iface.get_type          = fake_get_type;
    device->iface.get_props         = fake_get_props;
    device->iface.event_new         = fake_event_new;
    device->iface.event_free        = fake_event_free;
    device->iface.event_synchronize = fake_event_synchronize;
    return device;
}

static struct tsg_pager * pager_on(ggml_backend_dev_t device) {
    struct tsg_pager * pager;
    CHECK(tsg_pager_new(device, TSG_POLICY_LFRU, TSG_ENGINE_HOST, &pager) == TSG_OK);
    return pager;
}

static struct tsg_pager * pager_with(ggml_backend_dev_t device, struct tsg_pager * other, const char * weight) {
    const struct tsg_part part  = { .weight = weight, .type = GGML_TYPE_Q8_0, .ne0 = 64, .ne1 = 32 };
    struct tsg_pager *    pager = pager_on(device);
    int32_t               pool, layer;
    CHECK(!other || tsg_pager_join(pager, other) == TSG_OK);
    CHECK(rig_pool(pager, 4, &pool) == TSG_OK && tsg_pager_add_layer(pager, pool, 8, 2, &part, 1, &layer) == TSG_OK);
    CHECK(tsg_pager_commit(pager) == TSG_OK);
    return pager;
}

// ---- joining ----

static void who_may_join(void) {
    struct tsg_pager * a = rig_pager(TSG_POLICY_LFRU);
    struct tsg_pager * b = rig_pager(TSG_POLICY_LFRU);
    struct tsg_pager * c = pager_with(fake_device(0), NULL, "w");
    CHECK(rig_failed(tsg_pager_join(a, a), TSG_E_STATE, "once"));
    CHECK(rig_failed(tsg_pager_join(c, a), TSG_E_STATE, "before it is committed"));
    CHECK(tsg_pager_join(b, a) == TSG_OK);
    CHECK(rig_failed(tsg_pager_join(b, a), TSG_E_STATE, "once"));
    struct tsg_pager * d = pager_on(fake_device(1));
    struct tsg_pager * e = pager_on(&fake.device[1]);
    CHECK(tsg_pager_join(d, b) == TSG_OK);  // by any of them
    CHECK(rig_failed(tsg_pager_join(e, a), TSG_E_ARGUMENT, "cannot be two devices"));
    tsg_pager_free(a);  // the others stay together
    struct tsg_pager * f = pager_on(fake_device(2));
    CHECK(tsg_pager_join(f, d) == TSG_OK);
    tsg_pager_free(b), tsg_pager_free(c), tsg_pager_free(d), tsg_pager_free(e), tsg_pager_free(f);
}

static void not_more_than_llama_cpp_takes(void) {
    struct tsg_pager * all[TSG_MAX_DEVICES + 1];
    for (int i = 0; i <= TSG_MAX_DEVICES; i++) {
        all[i] = pager_on(fake_device(i));
        CHECK(i == 0 || (i < TSG_MAX_DEVICES ? tsg_pager_join(all[i], all[0]) == TSG_OK : rig_failed(tsg_pager_join(all[i], all[0]), TSG_E_ARGUMENT, "16")));
    }
    for (int i = 0; i <= TSG_MAX_DEVICES; i++) {
        tsg_pager_free(all[i]);
    }
}

// ---- the loader's questions ----

static ggml_backend_buffer_type_t * extra_types(struct tsg_pager * pager) {
    ggml_backend_dev_t                 device = tsg_pager_device(pager);
    ggml_backend_dev_get_extra_bufts_t get    = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
    return get ? get(device) : NULL;
}

// As weight_buft_supported() in llama-model-loader.cpp asks.
static bool takes(struct tsg_pager * pager, const char * name, ggml_backend_buffer_type_t buft, bool by_id) {
    struct ggml_context * ctx = ggml_init((struct ggml_init_params) { .mem_size = ggml_tensor_overhead() * 8, .no_alloc = true });
    struct ggml_tensor *  w   = ggml_new_tensor_3d(ctx, GGML_TYPE_Q8_0, 64, 32, by_id ? 8 : 1);
    struct ggml_tensor *  x   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 64, by_id ? 2 : 512, by_id ? 512 : 1);
    struct ggml_tensor *  op  = by_id ? ggml_mul_mat_id(ctx, w, x, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, 512)) : ggml_mul_mat(ctx, w, x);
    ggml_set_name(w, name);
    w->buffer      = ggml_backend_buft_alloc_buffer(buft, 0);
    const bool yes = ggml_backend_dev_supports_op(tsg_pager_device(pager), op);
    ggml_backend_buffer_free(w->buffer);
    ggml_free(ctx);
    return yes;
}

static void experts_go_where_their_layer_is(void) {
    ggml_backend_dev_t         cpu   = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    struct tsg_pager *         first = pager_with(cpu, NULL, "blk.0.w"), * second = pager_with(cpu, first, "blk.1.w");
    ggml_backend_buffer_type_t plain = ggml_backend_dev_buffer_type(tsg_pager_device(first)), own = ggml_backend_dev_buffer_type(tsg_pager_device(second));
    ggml_backend_buffer_type_t experts = tsg_pager_buffer_type(first), others = tsg_pager_buffer_type(second);
    CHECK(extra_types(first)[0] == experts && !extra_types(first)[1] && extra_types(second)[0] == others && !extra_types(second)[1]);
    CHECK(!takes(first, "blk.0.w", plain, true) && takes(first, "blk.0.w", experts, true));
    CHECK(!takes(second, "blk.1.w", own, true) && takes(second, "blk.1.w", others, true));
    CHECK(takes(first, "blk.1.w", plain, true) && !takes(first, "blk.1.w", experts, true));  // not planned here
    CHECK(takes(first, "blk.0.w", plain, false));                                            // no experts
    // llama.cpp's loader tells buffer types apart by name
    const char * names[] = { ggml_backend_buft_name(plain), ggml_backend_buft_name(own), ggml_backend_buft_name(experts), ggml_backend_buft_name(others) };
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < i; j++) {
            CHECK(strcmp(names[i], names[j]) != 0);
        }
    }
    tsg_pager_free(first), tsg_pager_free(second);
}

static void a_model_on_one_device_is_told_by_name(void) {
    struct tsg_pager * pager = pager_with(ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0), NULL, "w");
    CHECK(!extra_types(pager) && takes(pager, "w", ggml_backend_cpu_buffer_type(), true));
    tsg_pager_free(pager);
}

static void a_layer_elsewhere_is_not_ready(void) {
    struct rig rig = rig_new(&small);
    struct rig two = rig_new(&small);
    CHECK(tsg_pager_join(two.pager, rig.pager) == TSG_OK);
    rig_offer(&rig);
    CHECK(tsg_pager_commit(two.pager) == TSG_OK);
    CHECK(rig_ready(rig.pager) == TSG_OK && rig_failed(rig_ready(two.pager), TSG_E_STATE, "did not put blk.0.ffn_gate_exps.weight on CPU"));
    tsg_pager_free(two.pager);
    close(two.file[0]), close(two.file[1]);
    rig_close(&rig);
}

// ---- the scheduler's questions ----

static bool reads(struct tsg_pager * pager, ggml_backend_buffer_type_t buft) {
    return ggml_backend_dev_supports_buft(tsg_pager_device(pager), buft);
}

static void nobody_reads_another_devices_memory(void) {
    ggml_backend_dev_t         cpu   = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    struct tsg_pager *         first = pager_with(cpu, NULL, "blk.0.w"), * second = pager_with(cpu, first, "blk.1.w");
    ggml_backend_buffer_type_t plain = ggml_backend_dev_buffer_type(tsg_pager_device(first)), own = ggml_backend_dev_buffer_type(tsg_pager_device(second));
    CHECK(plain == ggml_backend_cpu_buffer_type() && own != plain && ggml_backend_buft_get_device(own) == tsg_pager_device(second));
    CHECK(reads(first, plain) && reads(first, tsg_pager_buffer_type(first)) && reads(second, own) && reads(second, tsg_pager_buffer_type(second)));
    CHECK(!reads(first, own) && !reads(first, tsg_pager_buffer_type(second)) && !reads(second, plain) && !reads(second, tsg_pager_buffer_type(first)));
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(own, 4096);  // it is memory as any other
    CHECK(buffer && ggml_backend_buffer_get_type(buffer) == own && ggml_backend_buffer_is_host(buffer));
    ggml_backend_buffer_free(buffer);
    tsg_pager_free(first), tsg_pager_free(second);
}

static void copies_take_the_inner_devices_way(void) {
    struct tsg_pager * a = pager_with(fake_device(0), NULL, "blk.0.w"), * b = pager_with(fake_device(1), a, "blk.1.w");
    ggml_backend_t     on_a = ggml_backend_dev_init(tsg_pager_device(a), NULL), on_b = ggml_backend_dev_init(tsg_pager_device(b), NULL);
    struct ggml_context * ctx = ggml_init((struct ggml_init_params) { .mem_size = ggml_tensor_overhead() * 2, .no_alloc = true });
    struct ggml_tensor *  x = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 4), * y = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 4);
    ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
    const float           values[4] = { 1, 2, 3, 4 };
    ggml_backend_tensor_set(x, values, 0, sizeof(values));
    ggml_backend_tensor_copy_async(on_a, on_b, x, y);
    CHECK(fake.n_copies == 1 && memcmp(y->data, values, sizeof(values)) == 0);
    CHECK(fake.from->device == &fake.device[0] && fake.to->device == &fake.device[1]);  // not the proxies
    ggml_backend_buffer_free(memory);
    ggml_free(ctx);
    ggml_backend_free(on_a), ggml_backend_free(on_b);
    tsg_pager_free(a), tsg_pager_free(b);
}

// What llama.cpp asks for before it computes several batches at a time.
static void events_are_the_inner_devices(void) {
    struct tsg_pager *            a = pager_with(fake_device(0), NULL, "blk.0.w"), * b = pager_with(fake_device(1), a, "blk.1.w");
    ggml_backend_t                on_a = ggml_backend_dev_init(tsg_pager_device(a), NULL), on_b = ggml_backend_dev_init(tsg_pager_device(b), NULL);
    struct ggml_backend_dev_props props;
    ggml_backend_dev_get_props(tsg_pager_device(a), &props);
    CHECK(props.caps.async && props.caps.events && props.type == GGML_BACKEND_DEVICE_TYPE_GPU);
    ggml_backend_event_t event = ggml_backend_event_new(tsg_pager_device(a));
    CHECK(event && event->device == &fake.device[0]);
    ggml_backend_event_record(event, on_a);
    ggml_backend_event_wait(on_b, event);
    ggml_backend_event_synchronize(event);
    CHECK(fake.n_records == 1 && fake.n_waits == 1);
    ggml_backend_event_free(event);
    CHECK(fake.n_events == 0);
    ggml_backend_free(on_a), ggml_backend_free(on_b);
    tsg_pager_free(a), tsg_pager_free(b);
}

// ---- at the same time ----

static int compute_twenty(void * data) {
    struct rig * rig = data;
    for (uint64_t seed = 0; seed < 20; seed++) {
        rig_compare_random(rig, rig->paged.backend, 1 + (int32_t) (seed % 5), seed);
    }
    return 0;
}

static void one_computes_while_another_is_busy(void) {
    struct rig one = rig_new(&small), two = rig_new(&small);
    thrd_t     thread;
    CHECK(tsg_pager_join(two.pager, one.pager) == TSG_OK);
    rig_load(&one);
    rig_load(&two);
    mtx_lock(&one.pager->lock);  // as while it waits for its copies
    CHECK(thrd_create(&thread, compute_twenty, &two) == thrd_success && thrd_join(thread, NULL) == thrd_success);
    mtx_unlock(&one.pager->lock);
    CHECK(thrd_create(&thread, compute_twenty, &two) == thrd_success);
    compute_twenty(&one);
    CHECK(thrd_join(thread, NULL) == thrd_success);
    rig_close(&one);
    rig_compare_random(&two, two.paged.backend, 3, 99);  // the other one goes on
    rig_close(&two);
}

// ---- memory that may be locked ----

static bool fake_register(struct tsg_pager * pager, void * base, size_t size) {
    (void) pager, (void) base, (void) size;
    return true;
}

static void fake_unregister(struct tsg_pager * pager, void * base) {
    (void) pager, (void) base;
}

static const void * fake_pointer(struct tsg_pager * pager, const void * host) {
    (void) pager;
    return host;
}

static void * fake_alloc(struct tsg_pager * pager, size_t size, void ** handle) {
    (void) pager, (void) size, (void) handle;
    tsg_fail(TSG_E_MEMORY, "no page today");
    return NULL;
}

static void fake_free(struct tsg_pager * pager, void * handle) {
    (void) pager, (void) handle;
}

// The kernel counts pages of a file that a driver locked as memory that may be had: it says the same every time.
static uint64_t fake_available(struct tsg_pager * pager) {
    (void) pager;
    return fake.available;
}

static const struct tsg_pin_ops fake_ops = { fake_register, fake_unregister, fake_pointer, fake_alloc, fake_free, fake_available };

static void together_they_lock_no_more_than_there_is(void) {
    struct rig one = rig_new(&small), two = rig_new(&small);
    one.pager->host.ops = two.pager->host.ops = &fake_ops;
    CHECK(tsg_pager_join(two.pager, one.pager) == TSG_OK);
    rig_offer(&one);
    rig_offer(&two);
    fake.available = UINT64_MAX;
    CHECK(rig_ready(one.pager) == TSG_OK);
    const uint64_t bytes = one.pager->host.locked;
    CHECK(bytes > 0 && rig_stats(&one).host_rung == TSG_HOST_MAPPED);
    tsg_host_close(one.pager);
    fake.available = bytes + bytes / 2;  // for one and a half
    CHECK(rig_ready(one.pager) == TSG_OK && rig_stats(&one).host_rung == TSG_HOST_MAPPED);
    CHECK(rig_ready(two.pager) == TSG_OK && rig_stats(&two).host_rung == TSG_HOST_PAGEABLE && strstr(tsg_pager_host(two.pager), "may be page-locked"));
    tsg_host_close(one.pager);
    tsg_host_close(two.pager);
    CHECK(rig_ready(two.pager) == TSG_OK && rig_stats(&two).host_rung == TSG_HOST_MAPPED);  // what the other one had came back
    rig_compare_random(&two, two.paged.backend, 3, 1);
    rig_close(&one);
    rig_close(&two);
}

static const struct test tests[] = {
    TEST(who_may_join),
    TEST(not_more_than_llama_cpp_takes),
    TEST(experts_go_where_their_layer_is),
    TEST(a_model_on_one_device_is_told_by_name),
    TEST(a_layer_elsewhere_is_not_ready),
    TEST(nobody_reads_another_devices_memory),
    TEST(copies_take_the_inner_devices_way),
    TEST(events_are_the_inner_devices),
    TEST(one_computes_while_another_is_busy),
    TEST(together_they_lock_no_more_than_there_is),
};

int main(int argc, char ** argv) {
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
