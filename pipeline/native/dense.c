/* Dense weights beside the mapping: copies in llama.cpp's repacked layouts, and how much of any memory is
 * resident.
 *
 * A repacked weight is a second ggml tensor in one of the CPU's extra buffer types, made and filled through
 * ggml's public functions. In the ask pass a matmul's src[0] is pointed from llama.cpp's tensor to it, before
 * the graph is planned; the weight itself is left alone, so that whatever else uses it (a row look-up in tied
 * embeddings) finds the plain layout. Which weights qualify, and for which type, ggml itself is asked, in the
 * way and order in which llama.cpp's loader asks.
 *
 * Ownership: bm_repacked owns its tensors and buffers. It outlives the llama_context whose graphs name them. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hook.h"

enum { MAX_BUFTS = 8, HUGE_PAGE = 2 << 20, PROBE_ROWS = 512, USAGE_WEIGHTS = 1 };

/* Missing from older headers: Linux 5.14. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

static struct {
    struct gg_tensor *(*mul_mat)(void *ctx, struct gg_tensor *, struct gg_tensor *);
    void *(*reg_dev_get)(struct gg_backend_reg *, size_t);
    void *(*reg_get_proc_address)(struct gg_backend_reg *, const char *);
    bool (*dev_supports_op)(void *dev, const struct gg_tensor *);
    void *(*buft_alloc_buffer)(void *buft, size_t);
    void (*buffer_free)(void *);
    void *(*buffer_get_base)(void *);
    size_t (*buffer_get_size)(void *);
    void (*buffer_set_usage)(void *, int);
    void *(*alloc_ctx_tensors_from_buft)(void *ctx, void *buft);
    void (*tensor_set)(struct gg_tensor *, const void *, size_t offset, size_t size);
} api;

static int bind_api(char *error, size_t cap) {
    void *lib = dlopen("libggml-base.so.0", RTLD_NOW | RTLD_NOLOAD);
    const struct {
        const char *name;
        void *slot;
    } want[] = {
        {"ggml_mul_mat", &api.mul_mat},
        {"ggml_backend_reg_dev_get", &api.reg_dev_get},
        {"ggml_backend_reg_get_proc_address", &api.reg_get_proc_address},
        {"ggml_backend_dev_supports_op", &api.dev_supports_op},
        {"ggml_backend_buft_alloc_buffer", &api.buft_alloc_buffer},
        {"ggml_backend_buffer_free", &api.buffer_free},
        {"ggml_backend_buffer_get_base", &api.buffer_get_base},
        {"ggml_backend_buffer_get_size", &api.buffer_get_size},
        {"ggml_backend_buffer_set_usage", &api.buffer_set_usage},
        {"ggml_backend_alloc_ctx_tensors_from_buft", &api.alloc_ctx_tensors_from_buft},
        {"ggml_backend_tensor_set", &api.tensor_set},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        void *f = lib ? dlsym(lib, want[i].name) : NULL;
        if (!f) {
            snprintf(error, cap, "libggml-base.so.0 has no function %s", want[i].name);
            return -1;
        }
        memcpy(want[i].slot, &f, sizeof f);
    }
    return 0;
}

/* A matrix of the file, [ne0, ne1]. */
struct bm_weight {
    const char *name;
    int64_t ne0, ne1;
    uint64_t start;   /* in its file */
    int32_t type, file;
    int32_t repacked; /* out: a buffer type takes it */
    int32_t reserved;
};

struct twin {
    uintptr_t plain; /* where llama.cpp's tensor has its data: in the mapping */
    struct gg_tensor *tensor;
    uint64_t start;
    int32_t file;
};

struct bm_repacked {
    int n_twins, n_bufts, op_mul_mat;
    struct twin *twin;              /* [n_twins], by `plain` once attached */
    struct gg_tensor **of_weight;   /* [weights] NULL where no type takes it */
    void *ctx[MAX_BUFTS], *buffer[MAX_BUFTS];
    _Atomic uint64_t used;          /* nodes pointed to a repacked weight */
};

BM_API void bm_repacked_free(struct bm_repacked *r) {
    if (!r) return;
    for (int i = 0; i < r->n_bufts; i++) {
        if (r->buffer[i]) api.buffer_free(r->buffer[i]);
        if (r->ctx[i]) gg.free(r->ctx[i]);
    }
    free(r->twin);
    free(r->of_weight);
    free(r);
}

/* Whether the buffer type takes the weight as a matmul's first operand: asked with an empty buffer, since the
 * answer depends on types and shapes only. */
static bool takes(void *dev, void *empty, const struct bm_weight *w, int *op_mul_mat) {
    void *ctx = gg.init((struct gg_init_params){8 * gg.tensor_overhead(), NULL, true});
    if (!ctx) return false;
    struct gg_tensor *a = gg.new_tensor_2d(ctx, w->type, w->ne0, w->ne1);
    struct gg_tensor *m = api.mul_mat(ctx, a, gg.new_tensor_2d(ctx, GG_TYPE_F32, w->ne0, PROBE_ROWS));
    *op_mul_mat = m->op;
    a->buffer = empty;
    bool yes = api.dev_supports_op(dev, m);
    gg.free(ctx);
    return yes;
}

/* Huge pages for memory that has not been touched yet. */
static void advise_huge(void *base, size_t size) {
    uintptr_t low = ((uintptr_t)base + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1);
    uintptr_t high = ((uintptr_t)base + size) & ~(uintptr_t)(HUGE_PAGE - 1);
    if (low < high) madvise((void *)low, high - low, MADV_HUGEPAGE);
}

/* Makes room for the repacked weights and marks which of `weights` those are. NULL with a sentence in `error`;
 * an empty one means that memory is short. */
BM_API struct bm_repacked *bm_repacked_new(struct bm_weight *weights, int n, char *error, size_t cap) {
    error[0] = 0;
    if (bind_api(error, cap)) return NULL;
    struct gg_backend_reg *reg = gg.cpu_reg();
    void *dev = api.reg_dev_get(reg, 0);
    void **(*extra_bufts)(void *) = NULL;
    void *f = api.reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    memcpy(&extra_bufts, &f, sizeof f);
    struct bm_repacked *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->twin = calloc((size_t)n + 1, sizeof *r->twin);
    r->of_weight = calloc((size_t)n + 1, sizeof *r->of_weight);
    if (!r->twin || !r->of_weight) goto fail;
    void **bufts = extra_bufts ? extra_bufts(dev) : NULL;
    for (; bufts && *bufts && r->n_bufts < MAX_BUFTS; bufts++) {
        void *empty = api.buft_alloc_buffer(*bufts, 0);
        int b = r->n_bufts++, before = r->n_twins;
        r->ctx[b] = gg.init((struct gg_init_params){((size_t)n + 1) * gg.tensor_overhead(), NULL, true});
        if (!empty || !r->ctx[b]) {
            if (empty) api.buffer_free(empty);
            goto fail;
        }
        for (int i = 0; i < n; i++) {
            struct bm_weight *w = &weights[i];
            if (w->repacked || !takes(dev, empty, w, &r->op_mul_mat)) continue;
            struct gg_tensor *t = gg.new_tensor_2d(r->ctx[b], w->type, w->ne0, w->ne1);
            gg.set_name(t, w->name);
            r->of_weight[i] = t;
            r->twin[r->n_twins++] = (struct twin){0, t, w->start, w->file};
            w->repacked = 1;
        }
        api.buffer_free(empty);
        if (r->n_twins == before) continue;
        r->buffer[b] = api.alloc_ctx_tensors_from_buft(r->ctx[b], *bufts);
        if (!r->buffer[b]) goto fail;
        api.buffer_set_usage(r->buffer[b], USAGE_WEIGHTS);
        advise_huge(api.buffer_get_base(r->buffer[b]), api.buffer_get_size(r->buffer[b]));
    }
    return r;
fail:
    bm_repacked_free(r);
    return NULL;
}

/* Repacks weight number `i` from the file's bytes. From any thread, several weights at a time. */
BM_API void bm_repacked_fill(struct bm_repacked *r, int i, const void *data) {
    struct gg_tensor *t = r->of_weight[i];
    api.tensor_set(t, data, 0, t->nb[1] * (size_t)t->ne[1]);
}

/* Buffer number `i`: its size in bytes, 0 past the last; `base` gets its address. */
BM_API uint64_t bm_repacked_buffer(const struct bm_repacked *r, int i, uintptr_t *base) {
    for (int b = 0; b < r->n_bufts; b++)
        if (r->buffer[b] && i-- == 0) {
            *base = (uintptr_t)api.buffer_get_base(r->buffer[b]);
            return api.buffer_get_size(r->buffer[b]);
        }
    return 0;
}

BM_API uint64_t bm_repacked_used(struct bm_repacked *r) { return atomic_load(&r->used); }

static int by_plain(const void *a, const void *b) {
    uintptr_t x = ((const struct twin *)a)->plain, y = ((const struct twin *)b)->plain;
    return (x > y) - (x < y);
}

/* Lets an engine's graphs use them, all filled; after bm_set_mapping, before the first batch. */
BM_API void bm_repacked_attach(struct bm_repacked *r, struct bm_engine *e) {
    for (int i = 0; i < r->n_twins; i++) r->twin[i].plain = e->mapping[r->twin[i].file].base + r->twin[i].start;
    qsort(r->twin, (size_t)r->n_twins, sizeof *r->twin, by_plain);
    e->repacked = r->n_twins ? r : NULL;
}

/* Ask pass: a matmul whose weight has a repacked twin gets that instead. */
void bm_use_repacked(struct bm_engine *e, struct gg_tensor *node) {
    struct bm_repacked *r = e->repacked;
    const struct gg_tensor *w = node->src[0];
    if (node->op != r->op_mul_mat || !w || w->view_src || node->src[1]->type != GG_TYPE_F32) return;
    struct twin key = {.plain = (uintptr_t)w->data};
    const struct twin *found = bsearch(&key, r->twin, (size_t)r->n_twins, sizeof key, by_plain);
    if (!found) return;
    struct gg_tensor *t = found->tensor;
    if (t->type != w->type || memcmp(t->ne, w->ne, sizeof t->ne) || memcmp(t->nb, w->nb, sizeof t->nb)) return;
    node->src[0] = t;
    atomic_fetch_add_explicit(&r->used, 1, memory_order_relaxed);
}

/* --- residency ------------------------------------------------------------------------------------------- */

/* How many of the pages at these addresses are in memory; -1 when the kernel does not say. */
BM_API int bm_resident_pages(const uintptr_t *pages, int n) {
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    int resident = 0;
    for (int i = 0; i < n; i++) {
        unsigned char state;
        if (mincore((void *)pages[i], page_bytes, &state)) return -1;
        resident += state & 1;
    }
    return resident;
}

/* Reads a stretch of a file mapping, whole pages, and maps it. The pages are read ahead in steps that the
 * kernel takes in full (it cuts one request to the drive's largest), so that the drive always has a queue. */
BM_API void bm_warm(uintptr_t start, uint64_t length, uint64_t step) {
    madvise((void *)start, length, MADV_NORMAL); /* a page that is lost later comes back with its neighbours */
    for (uint64_t at = 0; at < length; at += step)
        madvise((void *)(start + at), length - at < step ? length - at : step, MADV_WILLNEED);
    while (madvise((void *)start, length, MADV_POPULATE_READ)) {
        if (errno == EINTR) continue;
        if (errno == EINVAL) { /* before Linux 5.14 */
            size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
            for (uint64_t at = 0; at < length; at += page_bytes) (void)*(volatile const char *)(start + at);
        }
        return;
    }
}
