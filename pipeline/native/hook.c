/* The seam: finding ggml, checking its layout, swapping ops, rebinding dense weights, loading without
 * populating the file. docs/seam.md lists every assumption made here and what happens when it fails. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hook.h"

struct gg_api gg;
static int op_mul_mat_id = -1, op_custom = -1;

/* --- ggml, by SONAME -------------------------------------------------------------------------------- */

/* Finds the functions in the libraries that llama_cpp has already loaded. Opening them by path could map
 * a second copy with tables that nobody initialised. Returns 0, or -1 with a sentence in `error`. */
BM_API int bm_bind(char *error, size_t cap) {
    static const char *const sonames[2] = {"libggml-base.so.0", "libggml-cpu.so.0"};
    void *lib[2];
    for (int i = 0; i < 2; i++) {
        lib[i] = dlopen(sonames[i], RTLD_NOW | RTLD_NOLOAD);
        if (!lib[i]) {
            snprintf(error, cap, "%s is not loaded; llama_cpp must be imported first", sonames[i]);
            return -1;
        }
    }
    const struct {
        int lib;
        const char *name;
        void *slot;
    } want[] = {
        {0, "ggml_init", &gg.init},
        {0, "ggml_free", &gg.free},
        {0, "ggml_tensor_overhead", &gg.tensor_overhead},
        {0, "ggml_graph_overhead_custom", &gg.graph_overhead_custom},
        {0, "ggml_new_tensor_2d", &gg.new_tensor_2d},
        {0, "ggml_new_tensor_3d", &gg.new_tensor_3d},
        {0, "ggml_view_2d", &gg.view_2d},
        {0, "ggml_set_name", &gg.set_name},
        {0, "ggml_mul_mat_id", &gg.mul_mat_id},
        {0, "ggml_custom_4d", &gg.custom_4d},
        {0, "ggml_new_graph_custom", &gg.new_graph_custom},
        {0, "ggml_build_forward_expand", &gg.build_forward_expand},
        {0, "ggml_get_data", &gg.get_data},
        {0, "ggml_type_size", &gg.type_size},
        {0, "ggml_row_size", &gg.row_size},
        {1, "ggml_get_type_traits_cpu", &gg.type_traits_cpu},
        {1, "ggml_graph_plan", &gg.graph_plan},
        {1, "ggml_graph_compute", &gg.graph_compute},
        {1, "ggml_backend_cpu_reg", &gg.cpu_reg},
        {1, "ggml_cpu_init", &gg.cpu_init},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        void *f = dlsym(lib[want[i].lib], want[i].name);
        if (!f) {
            snprintf(error, cap, "%s has no function %s", sonames[want[i].lib], want[i].name);
            return -1;
        }
        memcpy(want[i].slot, &f, sizeof f);
    }
    return 0;
}

static void probe_fn(struct gg_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst, (void)ith, (void)nth, (void)userdata;
}

/* Makes tensors through ggml's API and compares what ggml wrote with where this library looks. */
static const char *compare_layout(void *ctx) {
    struct gg_tensor *w = gg.new_tensor_3d(ctx, GG_TYPE_F32, 96, 5, 3);
    gg.set_name(w, "bmoe layout probe");
    if (strcmp(w->name, "bmoe layout probe")) return "ggml_tensor.name";
    if (w->type != GG_TYPE_F32) return "ggml_tensor.type";
    if (w->ne[0] != 96 || w->ne[1] != 5 || w->ne[2] != 3 || w->ne[3] != 1) return "ggml_tensor.ne";
    if (w->nb[0] != 4 || w->nb[1] != 384 || w->nb[2] != 1920 || w->nb[3] != 5760) return "ggml_tensor.nb";
    struct gg_tensor *v = gg.view_2d(ctx, w, 8, 2, 384, 768);
    if (v->view_src != w || v->view_offs != 768 || v->src[0] != w) return "ggml_tensor.view_src";
    struct gg_tensor *x = gg.new_tensor_3d(ctx, GG_TYPE_F32, 96, 1, 2);
    struct gg_tensor *ids = gg.new_tensor_2d(ctx, GG_TYPE_I32, 2, 2);
    if (ids->type != GG_TYPE_I32 || ids->nb[0] != 4) return "the number of type I32";
    struct gg_tensor *m = gg.mul_mat_id(ctx, w, x, ids);
    if (m->src[0] != w || m->src[1] != x || m->src[2] != ids || m->src[3]) return "ggml_tensor.src of MUL_MAT_ID";
    if (m->ne[0] != 5 || m->ne[1] != 2 || m->ne[2] != 2) return "the shape of MUL_MAT_ID";
    static int mark;
    struct gg_tensor *c = gg.custom_4d(ctx, GG_TYPE_F32, 96, 1, 2, 1, &x, 1, probe_fn, GG_N_TASKS_MAX, &mark);
    struct gg_custom_params p;
    memcpy(&p, c->op_params, sizeof p);
    if (p.fun != probe_fn || p.n_tasks != GG_N_TASKS_MAX || p.userdata != &mark) return "the custom op's record";
    if (m->op == c->op || m->op == w->op || c->op == w->op) return "ggml_tensor.op";
    op_mul_mat_id = m->op;
    op_custom = c->op;
    c->data = &mark;
    if (gg.get_data(c) != &mark) return "ggml_tensor.data";
    const struct gg_type_traits_cpu *f32 = gg.type_traits_cpu(GG_TYPE_F32);
    if (!f32 || f32->vec_dot_type != GG_TYPE_F32 || !f32->vec_dot || f32->nrows != 1) return "ggml_type_traits_cpu";
    float a[8] = {1, 2, 3, 4, 5, 6, 7, 8}, dot = 0;
    f32->vec_dot(8, &dot, 0, a, 0, a, 0, 1);
    if (dot != 204) return "vec_dot";
    return NULL;
}

/* 0, or -1 with what differs in `error`. */
BM_API int bm_check_abi(char *error, size_t cap) {
    gg.cpu_init();
    void *ctx = gg.init((struct gg_init_params){16 * gg.tensor_overhead() + 4096, NULL, true});
    if (!ctx) {
        snprintf(error, cap, "ggml_init failed");
        return -1;
    }
    const char *what = compare_layout(ctx);
    gg.free(ctx);
    if (what) snprintf(error, cap, "%s differs", what);
    return what ? -1 : 0;
}

/* --- loading without populating the file ------------------------------------------------------------- */

/* The loader asks the CPU backend whether NUMA is on; "yes" makes it map the file without populating it.
 * The answer is changed for one name, in one record, for the duration of one load. */
static pthread_mutex_t patch_lock = PTHREAD_MUTEX_INITIALIZER;
static void *(*stock_get_proc_address)(struct gg_backend_reg *, const char *);

static bool yes(void) { return true; }

static void *answering_yes(struct gg_backend_reg *reg, const char *name) {
    if (strcmp(name, "ggml_backend_cpu_is_numa") == 0) return (void *)yes;
    return stock_get_proc_address(reg, name);
}

/* 1 when the record is as expected and now patched (and locked); 0 when it is not and nothing was done. */
BM_API int bm_lazy_map_begin(void) {
    struct gg_backend_reg *reg = gg.cpu_reg();
    if (!reg || reg->api_version != 2 || !reg->get_name || strcmp(reg->get_name(reg), "CPU") || !reg->get_proc_address)
        return 0;
    if (!reg->get_proc_address(reg, "ggml_backend_cpu_is_numa")) return 0;
    pthread_mutex_lock(&patch_lock);
    stock_get_proc_address = reg->get_proc_address;
    reg->get_proc_address = answering_yes;
    return 1;
}

BM_API void bm_lazy_map_end(void) {
    gg.cpu_reg()->get_proc_address = stock_get_proc_address;
    pthread_mutex_unlock(&patch_lock);
}

/* --- engine ------------------------------------------------------------------------------------------ */

BM_API void bm_engine_free(struct bm_engine *e) {
    if (!e) return;
    bm_work_free(e);
    bm_routing_free(e);
    bm_node_trace_free(e);
    bm_predict_free(e);
    for (int32_t i = 0; e->nodes && i < e->n_tensors; i++)
        for (struct bm_node *n = e->nodes[i], *next; n; n = next) {
            next = n->next;
            free(n);
        }
    void *all[] = {e->tensors, e->layers,   e->slice_tensor, e->state,     (void *)e->want_epoch, e->data, e->slot,
                   e->present, e->last_use, e->frequency,    e->ring,      e->segments,           e->nodes, e->weights,
                   e->slot_slice, e->entry_layer, e->phase, e->slot_address, e->speculative, e->layer_counters};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(e);
}

/* Builds the tables. Slice and entry ids must be dense: tensor by tensor, layer by layer.
 * `half_life` is in batches. NULL when out of memory. */
BM_API struct bm_engine *bm_engine_new(const struct bm_tensor_desc *tensors, int32_t n_tensors, int32_t n_layers,
                                       int32_t n_slices, int32_t n_entries, int32_t n_slots, int event_fd,
                                       double growth, uint64_t watchdog_ns, int serial) {
    struct bm_engine *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->n_tensors = n_tensors, e->n_layers = n_layers, e->n_slices = n_slices, e->n_entries = n_entries;
    e->n_slots = n_slots, e->event_fd = event_fd, e->growth = growth, e->weight = 1;
    e->watchdog_ns = watchdog_ns, e->serial = serial, e->map_low = UINTPTR_MAX;
    atomic_store(&e->current_layer, -1);
    atomic_store(&e->stop_slice, -1);
    e->ring_cap = 1;
    while (e->ring_cap < (uint32_t)n_slices + 1) e->ring_cap *= 2; /* a power of two: indices may wrap */
    e->weights_cap = 64;
    while (e->weights_cap < (uint32_t)n_tensors * 4) e->weights_cap *= 2;
    size_t ns = (size_t)n_slices, ne = (size_t)n_entries;
    e->tensors = calloc((size_t)n_tensors, sizeof *e->tensors);
    e->layers = calloc((size_t)n_layers, sizeof *e->layers);
    e->entry_layer = calloc(ne, sizeof *e->entry_layer);
    e->slice_tensor = calloc(ns, sizeof *e->slice_tensor);
    e->state = calloc(ns, sizeof *e->state);
    e->want_epoch = calloc(ns, sizeof *e->want_epoch);
    e->data = calloc(ns, sizeof *e->data);
    e->phase = calloc(ns, sizeof *e->phase);
    e->slot_address = calloc((size_t)n_slots + 1, sizeof *e->slot_address);
    e->slot = malloc(ns * sizeof *e->slot);
    e->slot_slice = malloc(((size_t)n_slots + 1) * sizeof *e->slot_slice);
    e->present = calloc(ne, 1);
    e->last_use = calloc(ne, sizeof *e->last_use);
    e->frequency = calloc(ne, sizeof *e->frequency);
    e->speculative = calloc(ne, 1);
    e->layer_counters = calloc((size_t)n_layers, sizeof *e->layer_counters);
    e->ring = malloc(e->ring_cap * sizeof *e->ring);
    e->nodes = calloc((size_t)n_tensors, sizeof *e->nodes);
    e->weights = calloc(e->weights_cap, sizeof *e->weights);
    if (!e->tensors || !e->layers || !e->entry_layer || !e->slice_tensor || !e->state || !e->want_epoch || !e->data ||
        !e->slot || !e->phase || !e->slot_address || !e->slot_slice || !e->present || !e->last_use || !e->frequency ||
        !e->ring || !e->nodes || !e->weights || !e->speculative || !e->layer_counters) {
        bm_engine_free(e);
        return NULL;
    }
    memset(e->slot, 0xff, ns * sizeof *e->slot);
    memset(e->slot_slice, 0xff, (size_t)n_slots * sizeof *e->slot_slice);
    for (int32_t i = 0; i < n_tensors; i++) {
        struct bm_tensor *t = &e->tensors[i];
        t->d = tensors[i];
        snprintf(t->name, sizeof t->name, "%s", tensors[i].name);
        t->d.name = t->name;
        t->rank = t->d.rank;
        t->traits = gg.type_traits_cpu ? gg.type_traits_cpu(t->d.type) : NULL;
        t->row_bytes = gg.row_size ? gg.row_size(t->d.type, t->d.ne0) : 0;
        struct bm_layer *l = &e->layers[t->d.layer];
        l->experts = t->d.experts, l->first_entry = t->d.first_entry;
        l->order[t->d.rank] = i;
        l->n_tensors++;
        if (sscanf(t->name, "blk.%d.", &l->block) != 1) l->block = -1;
        for (int32_t x = 0; x < t->d.experts; x++) {
            e->slice_tensor[t->d.first_slice + x] = i;
            e->entry_layer[t->d.first_entry + x] = t->d.layer;
        }
    }
    return e;
}

BM_API void bm_set_mapping(struct bm_engine *e, int file, uintptr_t base, uint64_t length) {
    e->mapping[file] = (struct bm_mapping){base, length};
    if (file >= e->n_files) e->n_files = file + 1;
    if (base < e->map_low) e->map_low = base;
    if (base + length > e->map_high) e->map_high = base + length;
}

/* Dense memory: file ranges and where they are now, sorted by (file, start). 0 or -1 (out of memory). */
BM_API int bm_set_segments(struct bm_engine *e, const struct bm_segment *segments, int n) {
    free(e->segments);
    e->segments = malloc((size_t)(n ? n : 1) * sizeof *segments);
    if (!e->segments) return -1;
    memcpy(e->segments, segments, (size_t)n * sizeof *segments);
    e->n_segments = n;
    return 0;
}

/* --- the eval callback --------------------------------------------------------------------------------- */

/* The file range behind an address in the mapping: file index, or -1. */
static int file_of(const struct bm_engine *e, uintptr_t p, uint64_t *offset) {
    for (int i = 0; i < e->n_files; i++)
        if (p - e->mapping[i].base < e->mapping[i].length) {
            *offset = p - e->mapping[i].base;
            return i;
        }
    return -1;
}

/* Points a dense tensor (or a view of one) that still lies in the mapping at its own memory. */
static void rebind(struct bm_engine *e, struct gg_tensor *t) {
    uint64_t offset;
    int file = file_of(e, (uintptr_t)t->data, &offset);
    if (file < 0) return;
    int low = 0, high = e->n_segments;
    while (low < high) {
        int mid = (low + high) / 2;
        const struct bm_segment *s = &e->segments[mid];
        if (s->file < file || (s->file == file && s->end <= offset))
            low = mid + 1;
        else
            high = mid;
    }
    if (low == e->n_segments) return;
    const struct bm_segment *s = &e->segments[low];
    if (s->file != file || offset < s->start) return; /* not loaded: expert or lazily read tensors stay mapped */
    t->data = (void *)(s->address + (offset - s->start));
    atomic_fetch_add_explicit(&e->counters.rebound, 1, memory_order_relaxed);
}

/* Which streamed tensor a weight is: by address of its tensor object once known, by name, shape and place
 * in this model's file the first time. -1 when it is not ours. */
static int32_t streamed(struct bm_engine *e, const struct gg_tensor *w) {
    uint32_t mask = e->weights_cap - 1, h = (uint32_t)(((uintptr_t)w >> 4) * 2654435761u) & mask;
    for (uint32_t i = 0; i < e->weights_cap; i++, h = (h + 1) & mask) {
        if (e->weights[h].key == w) {
            int32_t known = e->weights[h].tensor;
            /* A tensor object freed and made anew (LoRA, a second model) may have this address. */
            if (known < 0 || e->tensors[known].seen_data == w->data) return known;
            break;
        }
        if (!e->weights[h].key) break;
    }
    int32_t found = -1;
    uint64_t offset;
    int file = file_of(e, (uintptr_t)w->data, &offset);
    for (int32_t i = 0; file >= 0 && i < e->n_tensors; i++) {
        struct bm_tensor *t = &e->tensors[i];
        if (t->d.file == file && t->d.file_offset == offset && !strcmp(t->name, w->name) && w->type == t->d.type &&
            w->ne[0] == t->d.ne0 && w->ne[1] == t->d.ne1 && w->ne[2] == t->d.experts && w->nb[2] == t->d.slice_bytes &&
            w->nb[1] == t->row_bytes) {
            t->seen_data = w->data;
            found = i;
            break;
        }
    }
    if (!e->weights[h].key || e->weights[h].key == w) {
        e->weights[h].key = w;
        e->weights[h].tensor = found;
    }
    return found;
}

/* The order of a layer's matmuls is the graph's, learned from its first ask pass. */
static void learn_order(struct bm_engine *e, int32_t tensor) {
    struct bm_tensor *t = &e->tensors[tensor];
    if (t->rank_known) return;
    struct bm_layer *l = &e->layers[t->d.layer];
    int32_t rank = l->next_rank++;
    int32_t other = l->order[rank];
    l->order[t->rank] = other;
    e->tensors[other].rank = t->rank;
    l->order[rank] = tensor;
    t->rank = rank;
    t->rank_known = 1;
}

/* Whether the node's weight is streamed; if so, it now runs our kernel. */
static bool swap_op(struct bm_engine *e, struct gg_tensor *t) {
    int32_t index = streamed(e, t->src[0]);
    if (index < 0) return false;
    const struct gg_tensor *act = t->src[1], *ids = t->src[2];
    learn_order(e, index);
    struct bm_node *n = e->nodes[index], **link = &e->nodes[index];
    while (n && n->armed) link = &n->next, n = n->next;
    if (!n) {
        n = calloc(1, sizeof *n);
        if (!n) return true; /* the stock op reads through the mapping: slow, right */
        n->engine = e, n->tensor = index;
        *link = n;
    }
    size_t row = gg.row_size(e->tensors[index].traits->vec_dot_type, act->ne[0]);
    if (bm_work_reserve(e, ids->ne[0], ids->ne[1], act->ne[1] * act->ne[2], row, e->tensors[index].d.experts)) return true;
    memcpy(n->op_params, t->op_params, sizeof n->op_params);
    n->weights = e->last_weights;
    n->armed = true;
    atomic_store(&n->claim, 0);
    struct gg_custom_params p = {bm_kernel, GG_N_TASKS_MAX, n};
    memcpy(t->op_params, &p, sizeof p);
    t->op = op_custom;
    return true;
}

/* llama.cpp's eval callback: changes nodes in the ask pass. It asks for data, which cuts the graph, only for
 * node times and for a bias of the router. */
BM_API bool bm_eval(struct gg_tensor *t, bool ask, void *userdata) {
    struct bm_engine *e = userdata;
    if (!ask) {
        int32_t layer = e->cut_sorted ? bm_sorted_layer(e, t) : -1;
        if (layer >= 0 && e->substitute > 0) bm_substitute(e, layer, t);
        if (layer >= 0 && e->predict.route_ahead) bm_commit_route(e, layer, t);
        if (e->node_trace.mode) bm_trace_node(e, t);
        return true;
    }
    /* Nodes are only ever looked at again where something was asked for that needs it. */
    bool again = e->node_trace.mode ? bm_trace_asks(e, t) : false;
    if (e->cut_sorted && bm_sorted_layer(e, t) >= 0) again = true;
    if (e->watch_router && bm_is_router_weights(t)) e->last_weights = t;
    if (e->predict.on) bm_note_router(e, t);
    if (t->op == op_custom) {
        struct gg_custom_params p;
        memcpy(&p, t->op_params, sizeof p);
        if (p.fun == bm_kernel) { /* a reused graph */
            struct bm_node *n = p.userdata;
            n->armed = true;
            n->weights = e->last_weights;
            atomic_store(&n->claim, 0);
            return again;
        }
    }
    uintptr_t span = e->map_high - e->map_low;
    if (e->repacked) bm_use_repacked(e, t);
    bool ours = t->op == op_mul_mat_id && swap_op(e, t);
    if ((uintptr_t)t->data - e->map_low < span) rebind(e, t);
    for (int i = ours ? 1 : 0; i < GG_MAX_SRC; i++) /* an optional source in the middle may be missing */
        if (t->src[i] && (uintptr_t)t->src[i]->data - e->map_low < span) rebind(e, t->src[i]);
    return again;
}

/* llama.cpp's abort callback: asked between nodes. */
BM_API bool bm_abort(void *userdata) { return atomic_load(&((struct bm_engine *)userdata)->stop) != BM_RUN; }

/* The same for a resident context: any nonzero int. */
BM_API bool bm_flag_abort(void *flag) { return atomic_load((atomic_int *)flag) != 0; }

/* --- last words -------------------------------------------------------------------------------------------- */

static char last_words[256];

static void on_crash(int signal) {
    (void)signal;
    ssize_t written = write(STDERR_FILENO, last_words, strlen(last_words));
    (void)written;
    _exit(1);
}

/* A fault in native code ends the process with this line and code 1, not by a signal: some broken models make
 * llama.cpp follow a null pointer. For commands; a program that embeds bmoe keeps its own handlers. */
BM_API void bm_last_words(const char *line) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    struct sigaction action = {.sa_handler = on_crash, .sa_flags = SA_RESETHAND};
    snprintf(last_words, sizeof last_words, "%s", line);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigaction(faults[i], &action, NULL);
}
