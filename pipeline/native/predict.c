/* What is likely to be routed to next, told to the loop before it is asked for.
 *
 * Two sources: what the previous token used in a layer, and the next layers' router matrices applied to this
 * layer's router input (the "stale gate"). The thread that announced a matmul works it out after it has rung
 * the loop: other threads compute meanwhile, and where reads are missing it would have waited anyway.
 * Router biases and expert groups are not modelled; the control (a layer's own matrix on its own input) shows
 * when that makes the ranking wrong, and a watchdog then ends predicting. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hook.h"

static const char LOGITS[] = "ffn_moe_logits-";
enum { WATCHDOG_SLOTS = 2048 };
static const double WATCHDOG_AGREEMENT = 0.98;

/* In the ask pass: remembers the operands of each layer's router. */
void bm_note_router(struct bm_engine *e, const struct gg_tensor *t) {
    int32_t layer = bm_named_layer(e, t->name, LOGITS);
    if (layer < 0 || !t->src[0] || !t->src[1]) return;
    e->predict.router[layer].matrix = t->src[0];
    e->predict.router[layer].input = t->src[1];
}

/* Scores of `layer`'s router for the last row of `from`'s router input. False when they cannot be had. */
static bool scores(struct bm_engine *e, int32_t layer, int32_t from) {
    const struct gg_tensor *m = e->predict.router[layer].matrix, *x = e->predict.router[from].input;
    if (!m || !x || !m->data || !x->data || x->type != GG_TYPE_F32 || m->ne[0] != x->ne[0] || x->ne[1] != 1 ||
        m->ne[1] != e->layers[layer].experts)
        return false;
    const struct gg_type_traits_cpu *t = gg.type_traits_cpu(m->type);
    if (!t || !t->vec_dot) return false;
    const void *row = x->data;
    if (t->vec_dot_type != GG_TYPE_F32) {
        const struct gg_type_traits_cpu *to = gg.type_traits_cpu(t->vec_dot_type);
        size_t bytes = gg.row_size(t->vec_dot_type, m->ne[0]);
        if (!to || !to->from_float) return false;
        if (bytes > e->predict.row_cap) {
            void *grown = realloc(e->predict.row, bytes);
            if (!grown) return false;
            e->predict.row = grown, e->predict.row_cap = bytes;
        }
        to->from_float(x->data, e->predict.row, m->ne[0]);
        row = e->predict.row;
    }
    for (int64_t i = 0; i < m->ne[1]; i++)
        t->vec_dot((int)m->ne[0], &e->predict.score[i], 0, (const char *)m->data + i * (int64_t)m->nb[1], 0, row, 0, 1);
    return true;
}

/* The k best of `predict.score`, best first, ties to the lower expert. */
static void best(struct bm_engine *e, int32_t experts, int32_t k, int32_t *out) {
    float *s = e->predict.score;
    for (int32_t j = 0; j < k; j++) {
        int32_t at = 0;
        for (int32_t i = 1; i < experts; i++)
            if (s[i] > s[at]) at = i;
        out[j] = at;
        s[at] = -INFINITY;
    }
}

static int32_t *guess(struct bm_engine *e, int which, int32_t layer) {
    return e->predict.guess[which] + (size_t)layer * BM_MAX_TOP_K;
}

static void score_guess(struct bm_engine *e, int which, int32_t layer, const int32_t *ids, int32_t k, bool known) {
    struct bm_prediction *p = &e->predict.stats[(size_t)layer * BM_GUESSES + (size_t)which];
    if (!known) {
        p->unscored++;
        return;
    }
    const int32_t *g = guess(e, which, layer);
    uint64_t hits = 0;
    for (int32_t i = 0; i < k; i++)
        for (int32_t j = 0; j < k; j++)
            if (ids[i] == g[j]) {
                hits++;
                break;
            }
    p->rows++, p->slots += (uint64_t)k, p->hits += hits, p->exact += hits == (uint64_t)k;
}

/* Tells the loop about an expert that is not there; keeps one that is. */
static bool hint(struct bm_engine *e, int32_t layer, int32_t expert) {
    const struct bm_layer *l = &e->layers[layer];
    int32_t entry = l->first_entry + expert;
    bool absent = false;
    for (int32_t k = 0; k < l->n_tensors; k++) {
        int32_t slice = e->tensors[l->order[k]].d.first_slice + expert;
        absent |= (atomic_load_explicit(&e->state[slice], memory_order_relaxed) & BM_STATE_MASK) == BM_ABSENT;
    }
    /* Not to be evicted before its turn, whether it is there or is read now. */
    e->last_use[entry] = atomic_load_explicit(&e->clock, memory_order_relaxed);
    if (!absent) return false;
    uint32_t tail = atomic_load_explicit(&e->predict.tail, memory_order_relaxed);
    if (tail - atomic_load(&e->predict.head) >= BM_HINTS) return false;
    e->predict.hints[tail % BM_HINTS] = entry;
    atomic_store_explicit(&e->predict.tail, tail + 1, memory_order_release);
    return true;
}

static void watch(struct bm_engine *e, const int32_t *ids, int32_t k, const int32_t *own) {
    struct bm_predict *p = &e->predict;
    for (int32_t i = 0; i < k; i++)
        for (int32_t j = 0; j < k; j++)
            if (ids[i] == own[j]) {
                p->agreed++;
                break;
            }
    p->watched += (uint64_t)k;
    if (p->watched < WATCHDOG_SLOTS) return;
    if ((double)p->agreed < WATCHDOG_AGREEMENT * (double)p->watched) atomic_store(&p->tripped, 1);
    p->watched = p->agreed = 0;
}

/* After the announcement of a layer's first matmul in decode; `ids` are what is computed. Rings if need be. */
void bm_predict(struct bm_engine *e, int32_t layer, const struct gg_tensor *ids_tensor) {
    struct bm_predict *p = &e->predict;
    uint32_t clock = atomic_load_explicit(&e->clock, memory_order_relaxed);
    int32_t k = (int32_t)ids_tensor->ne[0], ids[BM_MAX_TOP_K], told = 0;
    if (ids_tensor->ne[1] != 1 || k > BM_MAX_TOP_K || !e->decode_phase) return;
    for (int32_t i = 0; i < k; i++) ids[i] = *(const int32_t *)((const char *)ids_tensor->data + i * (int64_t)ids_tensor->nb[0]);
    int32_t experts = e->layers[layer].experts;
    bool gate = (p->stale || p->log || p->route_ahead) && !atomic_load(&p->tripped);

    /* Own matrix on own input: what the router itself says, if nothing but the matrix decides. */
    if (gate && (p->log || p->calls % 8 == 0) && k <= experts && scores(e, layer, layer)) {
        best(e, experts, k, guess(e, BM_GUESS_OWN, layer));
        if (!(p->route_ahead && layer >= p->route_ahead)) watch(e, ids, k, guess(e, BM_GUESS_OWN, layer));
        p->known[BM_GUESS_OWN][layer] = clock;
    }
    if (p->log)
        for (int which = 0; which < BM_GUESSES; which++) {
            uint32_t since = which == BM_GUESS_PREVIOUS ? clock - 1 : clock;
            score_guess(e, which, layer, ids, k, p->known[which][layer] == since && since > 0);
        }
    memcpy(guess(e, BM_GUESS_PREVIOUS, layer), ids, (size_t)k * sizeof *ids);
    p->known[BM_GUESS_PREVIOUS][layer] = clock;

    for (int32_t d = 1; d <= p->temporal && layer + d < e->n_layers; d++) {
        if (p->known[BM_GUESS_PREVIOUS][layer + d] != clock - 1) continue;
        const int32_t *g = guess(e, BM_GUESS_PREVIOUS, layer + d);
        for (int32_t i = 0; i < k; i++) told += hint(e, layer + d, g[i]);
    }
    int32_t farthest = p->route_ahead ? p->route_ahead : p->log ? 2 : p->stale ? 1 : 0;
    for (int32_t d = p->route_ahead ? farthest : 1; gate && d <= farthest && layer + d < e->n_layers; d++) {
        int32_t to = layer + d, n = e->layers[to].experts;
        int which = p->route_ahead ? BM_GUESS_AHEAD : d == 1 ? BM_GUESS_STALE : BM_GUESS_STALE_2;
        if (k > n || !scores(e, to, layer)) continue;
        best(e, n, k, guess(e, which, to));
        p->known[which][to] = clock;
        for (int32_t i = 0; (p->stale || p->route_ahead) && (d == 1 || p->route_ahead) && i < k; i++)
            told += hint(e, to, guess(e, which, to)[i]);
    }
    p->calls++;
    if (told) bm_ring(e);
}

/* Before anything reads a layer's sorted scores: the choice made `route_ahead` layers before comes first. */
void bm_commit_route(struct bm_engine *e, int32_t layer, struct gg_tensor *sorted) {
    struct bm_predict *p = &e->predict;
    uint32_t clock = atomic_load_explicit(&e->clock, memory_order_relaxed);
    int32_t n = (int32_t)sorted->ne[0], k = e->top_k;
    if (layer < p->route_ahead || sorted->ne[1] != 1 || !e->decode_phase || k > n || k > BM_MAX_TOP_K) return;
    if (p->known[BM_GUESS_AHEAD][layer] != clock || atomic_load(&p->tripped)) {
        atomic_fetch_add_explicit(&e->counters.route_passed, 1, memory_order_relaxed);
        return;
    }
    int32_t *order = sorted->data;
    const int32_t *g = guess(e, BM_GUESS_AHEAD, layer);
    uint64_t agreed = 0;
    for (int32_t i = 0; i < k; i++)
        for (int32_t j = 0; j < k; j++) agreed += order[j] == g[i];
    for (int32_t i = 0; i < k; i++) { /* a permutation stays one */
        int32_t at = i;
        while (at < n && order[at] != g[i]) at++;
        if (at == n) continue;
        memmove(order + i + 1, order + i, (size_t)(at - i) * sizeof *order);
        order[i] = g[i];
    }
    atomic_fetch_add_explicit(&e->counters.route_committed, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&e->counters.route_agreed, agreed, memory_order_relaxed);
}

/* --- settings, before the first batch; results -------------------------------------------------------------- */

/* `temporal` layers ahead from the previous token; `stale`: one layer ahead from its router; `log`: score the
 * guesses; `route_ahead` layers: commit to the guess (lossy). 0 or -1. */
BM_API int bm_set_predict(struct bm_engine *e, int temporal, int stale, int log, int route_ahead, int32_t top_k) {
    struct bm_predict *p = &e->predict;
    int32_t widest = 1;
    for (int32_t i = 0; i < e->n_layers; i++)
        if (e->layers[i].experts > widest) widest = e->layers[i].experts;
    size_t n = (size_t)e->n_layers;
    p->router = calloc(n, sizeof *p->router);
    p->score = calloc((size_t)widest, sizeof *p->score);
    p->stats = calloc(n * BM_GUESSES, sizeof *p->stats);
    bool short_of_memory = !p->router || !p->score || !p->stats;
    for (int i = 0; i < BM_GUESSES; i++) {
        p->guess[i] = calloc(n * BM_MAX_TOP_K, sizeof *p->guess[i]);
        p->known[i] = calloc(n, sizeof *p->known[i]);
        short_of_memory |= !p->guess[i] || !p->known[i];
    }
    if (short_of_memory) return -1;
    p->temporal = temporal, p->stale = stale, p->log = log, p->route_ahead = route_ahead;
    p->on = true;
    e->top_k = top_k;
    if (route_ahead) e->cut_sorted = true;
    return 0;
}

/* Entries that may be wanted soon, oldest first. On the loop. */
BM_API int32_t bm_take_hints(struct bm_engine *e, int32_t *out, int32_t cap) {
    struct bm_predict *p = &e->predict;
    uint32_t head = atomic_load_explicit(&p->head, memory_order_relaxed), tail = atomic_load(&p->tail);
    int32_t n = 0;
    while (head != tail && n < cap) out[n++] = p->hints[head++ % BM_HINTS];
    atomic_store_explicit(&p->head, head, memory_order_release);
    return n;
}

/* [layers][BM_GUESSES] of rows, slots, hits, exact, unscored. Between batches. */
BM_API const struct bm_prediction *bm_predictions(struct bm_engine *e) { return e->predict.stats; }
BM_API int bm_predict_tripped(struct bm_engine *e) { return atomic_load(&e->predict.tripped); }

void bm_predict_free(struct bm_engine *e) {
    struct bm_predict *p = &e->predict;
    free(p->router), free(p->score), free(p->stats), free(p->row);
    for (int i = 0; i < BM_GUESSES; i++) free(p->guess[i]), free(p->known[i]);
}
