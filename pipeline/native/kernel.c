/* The expert-ready kernel: what a swapped MUL_MAT_ID runs instead of the stock one.
 *
 * The first compute thread to arrive announces the matmul (residency.c) and lays out its work; then all
 * threads claim pieces (one expert, a run of weight rows), experts in the order in which their slices
 * become ready, and sleep only when none is. Nobody leaves while a piece is unclaimed.
 *
 * Exactness. An expert with fewer than NEST_ROWS activation rows is computed with the type's own
 * vec_dot, which is what the stock kernel does there. From NEST_ROWS on the stock kernel may take a
 * tiled path with other rounding, so each piece runs the stock kernel itself: a private one-node graph
 * over these weight rows and this expert's gathered activation rows, whose results are scattered back.
 * Pieces are multiples of 64 weight rows, the tiled path's own grouping. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hook.h"

enum { NEST_ROWS = 8, PIECE_ALIGN = 64 };

#if defined(__x86_64__) || defined(__i386__)
#define cpu_pause() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define cpu_pause() __asm__ volatile("yield")
#else
#define cpu_pause() ((void)0)
#endif

struct bm_nest {
    void *ctx, *graph;
    struct gg_tensor *weight, *act, *ids, *out;
    uint8_t *work;
    float *result;
    int32_t *zeros;
    size_t work_cap, result_cap, zeros_cap;
};

/* Short waits for another thread's conversion: spin, then give the core away in case that thread lost it. */
static void spin_until(atomic_uchar *word, unsigned char value) {
    for (int i = 0; atomic_load_explicit(word, memory_order_acquire) != value; i++) {
        if (i < 2000)
            cpu_pause();
        else
            sched_yield();
    }
}

/* --- scratch: grows in the ask pass, never in the kernel -------------------------------------------- */

static int grow(void *pointer, size_t *cap, size_t need, size_t unit) {
    void **p = pointer;
    if (need <= *cap) return 0;
    free(*p);
    *p = aligned_alloc(64, (need * unit + 63) & ~(size_t)63);
    *cap = *p ? need : 0;
    return *p ? 0 : -1;
}

int bm_work_reserve(struct bm_engine *e, int64_t n_ids, int64_t n_tokens, int64_t act_rows, size_t row_bytes,
                    int64_t experts) {
    struct bm_work *w = &e->work;
    size_t rows = (size_t)(n_ids * n_tokens);
    int bad = 0;
    if ((size_t)experts > w->cap_experts) {
        size_t cap = 0;
        bad |= grow(&w->slot_of, &cap, (size_t)experts, sizeof(int32_t)), cap = 0;
        bad |= grow(&w->expert, &cap, (size_t)experts, sizeof(int32_t)), cap = 0;
        bad |= grow(&w->row_first, &cap, (size_t)experts, sizeof(int32_t)), cap = 0;
        bad |= grow(&w->row_count, &cap, (size_t)experts, sizeof(int32_t)), cap = 0;
        bad |= grow(&w->chunks, &cap, (size_t)experts, sizeof(int32_t)), cap = 0;
        bad |= grow(&w->chunk_rows, &cap, (size_t)experts, sizeof(int32_t)), cap = 0;
        bad |= grow(&w->next, &cap, (size_t)experts, sizeof(atomic_int)), cap = 0;
        bad |= grow(&w->done, &cap, (size_t)experts, sizeof(atomic_int)), cap = 0;
        bad |= grow(&w->prepared, &cap, (size_t)experts, sizeof(atomic_uchar));
        w->cap_experts = bad ? 0 : (size_t)experts;
        if (!bad) memset(w->slot_of, 0xff, (size_t)experts * sizeof(int32_t));
    }
    bad |= grow(&w->rows, &w->cap_rows, rows, sizeof(int32_t));
    bad |= grow(&w->converted, &w->cap_ids, (size_t)act_rows, 1);
    bad |= grow(&w->act, &w->cap_act, (size_t)act_rows * row_bytes, 1);
    bad |= grow(&w->gathered, &w->cap_gathered, rows * row_bytes, 1);
    return bad;
}

void bm_work_free(struct bm_engine *e) {
    struct bm_work *w = &e->work;
    void *all[] = {w->expert, w->row_first, w->row_count, w->chunks, w->chunk_rows, w->rows,  w->next,
                   w->done,   w->prepared,  w->converted, w->act,    w->gathered,   w->slot_of};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    memset(w, 0, sizeof *w);
    for (int i = 0; i < BM_MAX_THREADS; i++) {
        struct bm_nest *n = e->nest[i];
        if (!n) continue;
        gg.free(n->ctx);
        free(n->work), free(n->result), free(n->zeros), free(n);
        e->nest[i] = NULL;
    }
}

/* --- announcement ------------------------------------------------------------------------------------ */

/* Groups the rows by expert and announces. -1 when an id is out of range (never touch memory by it), else
 * whether the loop must be rung. */
static int lay_out(struct bm_engine *e, struct bm_node *node, struct gg_tensor *dst, int nth) {
    struct bm_tensor *t = &e->tensors[node->tensor];
    struct bm_work *w = &e->work;
    const struct gg_tensor *act = dst->src[1], *ids = dst->src[2];
    int64_t n_ids = ids->ne[0], n_tokens = ids->ne[1], ne1 = t->d.ne1;
    if (e->watch_router && t->rank == 0) bm_router(e, node, dst);
    w->tensor = node->tensor;
    w->n_ids = n_ids, w->n_tokens = n_tokens, w->n_unique = 0;
    w->convert = act->type != t->traits->vec_dot_type;
    w->act_row_bytes = gg.row_size(t->traits->vec_dot_type, act->ne[0]);
    w->shared_rows = act->ne[1] < n_ids;
    for (int64_t tok = 0; tok < n_tokens; tok++)
        for (int64_t k = 0; k < n_ids; k++) {
            int32_t x = *(const int32_t *)((const char *)ids->data + tok * (int64_t)ids->nb[1] + k * (int64_t)ids->nb[0]);
            if (x < 0 || x >= t->d.experts) {
                snprintf(e->fault, sizeof e->fault, "%s: the router chose expert %d of %d", t->name, x, t->d.experts);
                for (int32_t u = 0; u < w->n_unique; u++) w->slot_of[w->expert[u]] = -1; /* for the next one */
                return -1;
            }
            if (w->slot_of[x] < 0) {
                w->slot_of[x] = w->n_unique;
                w->expert[w->n_unique] = x;
                w->row_count[w->n_unique++] = 0;
            }
            w->row_count[w->slot_of[x]]++;
        }
    for (int32_t u = 0, first = 0; u < w->n_unique; u++) {
        w->row_first[u] = first;
        first += w->row_count[u];
        /* Decode: pieces small enough to share one expert. Batches: a nested call per piece, so larger. */
        int64_t piece = w->row_count[u] >= NEST_ROWS ? (ne1 + nth - 1) / nth : (ne1 + 4 * nth - 1) / (4 * nth);
        if (w->row_count[u] < NEST_ROWS && piece > 128) piece = 128;
        piece = (piece + PIECE_ALIGN - 1) / PIECE_ALIGN * PIECE_ALIGN;
        w->chunk_rows[u] = (int32_t)piece;
        w->chunks[u] = (int32_t)((ne1 + piece - 1) / piece);
        w->row_count[u] = 0;
        atomic_store_explicit(&w->next[u], 0, memory_order_relaxed);
        atomic_store_explicit(&w->done[u], 0, memory_order_relaxed);
        atomic_store_explicit(&w->prepared[u], 0, memory_order_relaxed);
    }
    for (int64_t tok = 0; tok < n_tokens; tok++)
        for (int64_t k = 0; k < n_ids; k++) {
            int32_t x = *(const int32_t *)((const char *)ids->data + tok * (int64_t)ids->nb[1] + k * (int64_t)ids->nb[0]);
            int32_t u = w->slot_of[x];
            w->rows[w->row_first[u] + w->row_count[u]++] = (int32_t)(k + tok * n_ids);
        }
    for (int32_t u = 0; u < w->n_unique; u++) w->slot_of[w->expert[u]] = -1;
    if (w->convert && w->shared_rows) memset((void *)w->converted, 0, (size_t)(act->ne[1] * act->ne[2]));
    return bm_announce(e, node->tensor, w->expert, w->n_unique);
}

/* --no-overlap: nothing is computed before the whole layer is there (or the loop has no slot left). */
static void wait_whole_layer(struct bm_engine *e, struct bm_tensor *t) {
    struct bm_layer *layer = &e->layers[t->d.layer];
    uint64_t waited = 0;
    for (int32_t k = 0; k < layer->n_tensors; k++)
        for (int32_t u = 0; u < e->work.n_unique; u++) {
            int32_t slice = e->tensors[layer->order[k]].d.first_slice + e->work.expert[u];
            for (;;) {
                uint32_t seen = atomic_load(&e->ready_seq);
                if (bm_slice_ready(e, slice) || atomic_load(&e->starved) || atomic_load(&e->stop)) break;
                /* Taken for a slice that was waited for; nobody reads it before its own matmul asks again. */
                if ((atomic_load(&e->state[slice]) & BM_STATE_MASK) == BM_ABSENT) break;
                bm_wait_ready(e, seen, &waited, slice);
            }
        }
}

/* --- activations ------------------------------------------------------------------------------------- */

static const char *act_source(const struct bm_work *w, const struct gg_tensor *act, int32_t row, int64_t *index) {
    int64_t k = row % w->n_ids, tok = row / w->n_ids, i1 = k % act->ne[1];
    *index = i1 + tok * act->ne[1];
    return (const char *)act->data + i1 * (int64_t)act->nb[1] + tok * (int64_t)act->nb[2];
}

/* Makes sure expert `u`'s activation rows are where act_row looks for them. One thread does it. */
static void prepare(struct bm_engine *e, const struct gg_tensor *act, int32_t u) {
    struct bm_work *w = &e->work;
    if (atomic_load_explicit(&w->prepared[u], memory_order_acquire) == 2) return;
    unsigned char none = 0;
    if (!atomic_compare_exchange_strong(&w->prepared[u], &none, 1)) {
        spin_until(&w->prepared[u], 2);
        return;
    }
    bool nested = w->row_count[u] >= NEST_ROWS;
    for (int32_t j = 0; j < w->row_count[u] && (w->convert || nested); j++) {
        int64_t index;
        int32_t row = w->row_first[u] + j;
        const char *source = act_source(w, act, w->rows[row], &index);
        uint8_t *gathered = w->gathered + (size_t)row * w->act_row_bytes;
        if (!w->convert) {
            memcpy(gathered, source, w->act_row_bytes);
            continue;
        }
        const struct gg_type_traits_cpu *dot = gg.type_traits_cpu(e->tensors[w->tensor].traits->vec_dot_type);
        if (!w->shared_rows) {
            dot->from_float((const float *)source, gathered, act->ne[0]);
            continue;
        }
        uint8_t *shared = w->act + (size_t)index * w->act_row_bytes;
        none = 0;
        if (atomic_compare_exchange_strong(&w->converted[index], &none, 1)) {
            dot->from_float((const float *)source, shared, act->ne[0]);
            atomic_store_explicit(&w->converted[index], 2, memory_order_release);
        } else {
            spin_until(&w->converted[index], 2);
        }
        if (nested) memcpy(gathered, shared, w->act_row_bytes);
    }
    atomic_store_explicit(&w->prepared[u], 2, memory_order_release);
}

static const void *act_row(const struct bm_work *w, const struct gg_tensor *act, int32_t u, int32_t j) {
    int64_t index;
    int32_t row = w->row_first[u] + j;
    const char *source = act_source(w, act, w->rows[row], &index);
    if (!w->convert) return source;
    return w->shared_rows ? w->act + (size_t)index * w->act_row_bytes : w->gathered + (size_t)row * w->act_row_bytes;
}

/* --- pieces ------------------------------------------------------------------------------------------ */

static float *out_row(const struct bm_work *w, const struct gg_tensor *dst, int32_t row) {
    int64_t k = row % w->n_ids, tok = row / w->n_ids;
    return (float *)((char *)dst->data + k * (int64_t)dst->nb[1] + tok * (int64_t)dst->nb[2]);
}

static void piece_by_dots(struct bm_engine *e, struct gg_tensor *dst, const uint8_t *slice, int32_t u, int64_t r0,
                          int64_t r1) {
    const struct bm_work *w = &e->work;
    const struct bm_tensor *t = &e->tensors[w->tensor];
    int n = (int)t->d.ne0;
    for (int64_t block = r0; block < r1; block += 16) {
        int64_t end = block + 16 < r1 ? block + 16 : r1;
        for (int32_t j = 0; j < w->row_count[u]; j++) {
            const void *x = act_row(w, dst->src[1], u, j);
            float *y = out_row(w, dst, w->rows[w->row_first[u] + j]);
            for (int64_t r = block; r < end; r++)
                t->traits->vec_dot(n, &y[r], 0, slice + (size_t)r * t->row_bytes, 0, x, 0, 1);
        }
    }
}

static struct bm_nest *nest_of(struct bm_engine *e, int ith) {
    struct bm_nest *n = e->nest[ith];
    if (n) return n;
    n = calloc(1, sizeof *n);
    if (!n) return NULL;
    size_t bytes = 8 * gg.tensor_overhead() + gg.graph_overhead_custom(8, false) + 4096;
    n->ctx = gg.init((struct gg_init_params){bytes, NULL, true});
    if (!n->ctx) {
        free(n);
        return NULL;
    }
    n->weight = gg.new_tensor_3d(n->ctx, GG_TYPE_F32, 256, 8, 1);
    n->act = gg.new_tensor_3d(n->ctx, GG_TYPE_F32, 256, 1, 8);
    n->ids = gg.new_tensor_2d(n->ctx, GG_TYPE_I32, 1, 8);
    n->out = gg.mul_mat_id(n->ctx, n->weight, n->act, n->ids);
    n->graph = gg.new_graph_custom(n->ctx, 8, false);
    gg.build_forward_expand(n->graph, n->out);
    return e->nest[ith] = n;
}

static void shape(struct gg_tensor *t, int type, int64_t n0, int64_t n1, int64_t n2, size_t row_bytes, void *data) {
    t->type = type;
    t->ne[0] = n0, t->ne[1] = n1, t->ne[2] = n2, t->ne[3] = 1;
    t->nb[0] = gg.type_size(type), t->nb[1] = row_bytes, t->nb[2] = row_bytes * (size_t)n1;
    t->nb[3] = t->nb[2] * (size_t)n2;
    t->data = data;
}

static bool piece_by_stock(struct bm_engine *e, struct bm_node *node, struct gg_tensor *dst, const uint8_t *slice,
                           int32_t u, int64_t r0, int64_t r1, int ith) {
    const struct bm_work *w = &e->work;
    const struct bm_tensor *t = &e->tensors[w->tensor];
    struct bm_nest *n = nest_of(e, ith);
    int64_t rows = w->row_count[u], out = r1 - r0;
    if (!n || grow(&n->result, &n->result_cap, (size_t)(rows * out), sizeof(float))) return false;
    if ((size_t)rows > n->zeros_cap) {
        if (grow(&n->zeros, &n->zeros_cap, (size_t)rows, sizeof(int32_t))) return false;
        memset(n->zeros, 0, n->zeros_cap * sizeof(int32_t));
    }
    shape(n->weight, t->d.type, t->d.ne0, out, 1, t->row_bytes, (void *)(slice + (size_t)r0 * t->row_bytes));
    shape(n->act, t->traits->vec_dot_type, t->d.ne0, 1, rows, w->act_row_bytes,
          w->gathered + (size_t)w->row_first[u] * w->act_row_bytes);
    shape(n->ids, GG_TYPE_I32, 1, rows, 1, sizeof(int32_t), n->zeros);
    shape(n->out, GG_TYPE_F32, out, 1, rows, (size_t)out * sizeof(float), n->result);
    memcpy(n->out->op_params, node->op_params, sizeof node->op_params);
    struct gg_cplan plan = gg.graph_plan(n->graph, 1, NULL);
    if (grow(&n->work, &n->work_cap, plan.work_size, 1)) return false;
    plan.work_data = n->work;
    if (gg.graph_compute(n->graph, &plan) != 0) return false;
    for (int64_t j = 0; j < rows; j++)
        memcpy(out_row(w, dst, w->rows[w->row_first[u] + j]) + r0, n->result + j * out, (size_t)out * sizeof(float));
    return true;
}

/* --- the kernel ---------------------------------------------------------------------------------------- */

void bm_kernel(struct gg_tensor *dst, int ith, int nth, void *userdata) {
    struct bm_node *node = userdata;
    struct bm_engine *e = node->engine;
    struct bm_work *w = &e->work;
    uint64_t t0 = ith == 0 ? bm_now_ns() : 0, waited = 0;
    if (atomic_load(&e->stop)) return;

    unsigned char unclaimed = 0;
    if (atomic_compare_exchange_strong(&node->claim, &unclaimed, 1)) {
        node->armed = false;
        int ring = lay_out(e, node, dst, nth);
        if (ring < 0) {
            w->n_unique = 0;
            bm_stop_now(e, BM_STOP_FAULT, -1);
        }
        if (e->serial) { /* the whole layer first; the others sleep on the announcement meanwhile */
            if (ring > 0) bm_ring(e);
            if (e->tensors[node->tensor].rank == 0) wait_whole_layer(e, &e->tensors[node->tensor]);
            atomic_store_explicit(&node->claim, 2, memory_order_release);
            bm_ready_changed(e);
        } else {
            atomic_store_explicit(&node->claim, 2, memory_order_release);
            if (ring > 0) bm_ring(e);
        }
        if (e->predict.on && ring >= 0 && e->tensors[node->tensor].rank == 0)
            bm_predict(e, e->tensors[node->tensor].d.layer, dst->src[2]);
    } else if (e->serial) {
        for (;;) {
            uint32_t seen = atomic_load(&e->ready_seq);
            if (atomic_load_explicit(&node->claim, memory_order_acquire) == 2 || atomic_load(&e->stop)) break;
            waited = 0; /* the announcer's watchdog knows the slice */
            bm_wait_ready(e, seen, &waited, -1);
        }
        if (atomic_load_explicit(&node->claim, memory_order_acquire) != 2) return;
        waited = 0;
    } else {
        spin_until(&node->claim, 2);
    }

    const struct bm_tensor *t = &e->tensors[w->tensor];
    int32_t n = w->n_unique, start = n ? (int32_t)((int64_t)ith * n / nth) : 0;
    /* One expert at a time for all threads when there are few; spread over many. */
    if (n <= 2 * nth || w->n_tokens == 1) start = 0;
    for (;;) {
        uint32_t seen = atomic_load(&e->ready_seq);
        int32_t waiting = -1;
        bool progress = false;
        for (int32_t i = 0; i < n; i++) {
            int32_t u = start + i < n ? start + i : start + i - n;
            if (atomic_load_explicit(&w->next[u], memory_order_relaxed) >= w->chunks[u]) continue;
            int32_t slice = t->d.first_slice + w->expert[u];
            if (!bm_slice_ready(e, slice)) {
                /* Look again: others may have finished it, and it may have been evicted since. While a
                 * piece is unclaimed it is pinned, so then "not ready" is the truth. */
                if (waiting < 0 && atomic_load(&w->next[u]) < w->chunks[u]) waiting = slice;
                continue;
            }
            const uint8_t *bytes = e->data[slice];
            for (;;) {
                int c = atomic_fetch_add(&w->next[u], 1);
                if (c >= w->chunks[u]) break;
                progress = true;
                prepare(e, dst->src[1], u);
                int64_t r0 = (int64_t)c * w->chunk_rows[u], r1 = r0 + w->chunk_rows[u];
                if (r1 > t->d.ne1) r1 = t->d.ne1;
                bm_test_delay(e);
                if (w->row_count[u] < NEST_ROWS) {
                    piece_by_dots(e, dst, bytes, u, r0, r1);
                } else if (!piece_by_stock(e, node, dst, bytes, u, r0, r1, ith)) {
                    snprintf(e->fault, sizeof e->fault, "%s: the nested graph failed (out of memory?)", t->name);
                    bm_stop_now(e, BM_STOP_FAULT, slice);
                }
                if (atomic_fetch_add(&w->done[u], 1) + 1 == w->chunks[u]) bm_unpin(e, slice);
            }
        }
        if (waiting < 0 && !progress) break;
        if (progress) {
            waited = 0;
            continue;
        }
        if (atomic_load(&e->stop)) break;
        bm_wait_ready(e, seen, &waited, waiting);
    }
    if (ith == 0) {
        uint64_t took = bm_now_ns() - t0;
        atomic_fetch_add_explicit(&e->counters.kernel_ns, took, memory_order_relaxed);
        atomic_fetch_add_explicit(&e->layer_counters[e->tensors[node->tensor].d.layer].kernel_ns, took,
                                  memory_order_relaxed);
        atomic_fetch_add_explicit(&e->counters.nodes, 1, memory_order_relaxed);
    }
}
