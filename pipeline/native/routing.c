/* What is done with the router's choice before it is used: recorded, replayed, thinned out, biased.
 *
 * The choice and its weights are complete before a layer's first expert matmul runs, and everything that
 * reads them later reads the same memory. So they are looked at and changed there, by the one thread that
 * announces the matmul, without cutting the graph. Only a bias has to act earlier, before weights are
 * gathered: for that the node that sorts the scores is computed alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hook.h"

static const char WEIGHTS[] = "ffn_moe_weights", SORTED[] = "ffn_moe_argsort-";

/* The layer with experts whose block number follows `prefix` and ends the name, or -1. */
int32_t bm_named_layer(const struct bm_engine *e, const char *name, const char *prefix) {
    size_t n = strlen(prefix);
    if (strncmp(name, prefix, n) != 0) return -1;
    char *end;
    long block = strtol(name + n, &end, 10);
    for (int32_t i = 0; *end == 0 && i < e->n_layers; i++)
        if (e->layers[i].block == block) return i;
    return -1;
}

/* --- the router's weights ------------------------------------------------------------------------------ */

/* Whether a node may be the weights of a layer's choice; the last one before the matmul is. */
bool bm_is_router_weights(const struct gg_tensor *t) {
    return strncmp(t->name, WEIGHTS, sizeof WEIGHTS - 1) == 0 && strncmp(t->name + sizeof WEIGHTS - 1, "_sum", 4) != 0;
}

/* Where the weight of slot `k` of token `tok` is; NULL when the tensor has another shape. */
static float *weight_at(const struct gg_tensor *w, int64_t nu, int64_t nt, int64_t k, int64_t tok) {
    if (!w || !w->data || w->type != GG_TYPE_F32) return NULL;
    if (w->ne[0] == 1 && w->ne[1] == nu && w->ne[2] == nt && w->ne[3] == 1)
        return (float *)((char *)w->data + k * (int64_t)w->nb[1] + tok * (int64_t)w->nb[2]);
    if (w->ne[0] == nu && w->ne[1] == nt && w->ne[2] == 1 && w->ne[3] == 1)
        return (float *)((char *)w->data + k * (int64_t)w->nb[0] + tok * (int64_t)w->nb[1]);
    return NULL;
}

static int32_t *id_at(const struct gg_tensor *ids, int64_t k, int64_t tok) {
    return (int32_t *)((char *)ids->data + tok * (int64_t)ids->nb[1] + k * (int64_t)ids->nb[0]);
}

/* --- residency ------------------------------------------------------------------------------------------ */

/* 0 not there, 1 there or on its way, 2 the same because it was read before anyone asked. */
static int residency(const struct bm_engine *e, const struct bm_layer *l, int32_t expert) {
    for (int32_t k = 0; k < l->n_tensors; k++) {
        int32_t slice = e->tensors[l->order[k]].d.first_slice + expert;
        if ((atomic_load_explicit(&e->state[slice], memory_order_relaxed) & BM_STATE_MASK) < BM_READING) return 0;
    }
    return e->speculative[l->first_entry + expert] ? 2 : 1;
}

/* With `deterministic`, what is dropped depends on the tokens alone: on a cache that exists only in the
 * books, of the same size, that gives up the lowest aged count. */
static bool is_there(const struct bm_engine *e, const struct bm_layer *l, int32_t expert) {
    if (e->drop.deterministic) return e->drop.booked[l->first_entry + expert];
    return residency(e, l, expert) != 0;
}

static void book(struct bm_engine *e, int32_t entry) {
    if (e->drop.booked[entry]) return;
    if (e->drop.n_booked == e->drop.capacity) {
        int32_t worst = -1;
        for (int32_t i = 0; i < e->n_entries; i++)
            if (e->drop.booked[i] && (worst < 0 || e->frequency[i] < e->frequency[worst])) worst = i;
        if (worst < 0) return;
        e->drop.booked[worst] = 0;
        e->drop.n_booked--;
    }
    e->drop.booked[entry] = 1;
    e->drop.n_booked++;
}

/* --- recording ------------------------------------------------------------------------------------------- */

static struct bm_route_row *new_row(struct bm_engine *e) {
    if (e->route.n == e->route.cap) {
        size_t cap = e->route.cap ? 2 * e->route.cap : 4096;
        struct bm_route_row *grown = realloc(e->route.rows, cap * sizeof *grown);
        if (!grown) {
            e->route.lost++;
            return NULL;
        }
        e->route.rows = grown;
        e->route.cap = cap;
    }
    return &e->route.rows[e->route.n++];
}

static uint32_t missing_bytes(const struct bm_engine *e, const struct bm_layer *l, int32_t expert) {
    uint64_t bytes = 0;
    for (int32_t k = 0; k < l->n_tensors; k++) {
        const struct bm_tensor *t = &e->tensors[l->order[k]];
        int32_t slice = t->d.first_slice + expert;
        if ((atomic_load_explicit(&e->state[slice], memory_order_relaxed) & BM_STATE_MASK) < BM_READING)
            bytes += t->d.slice_bytes;
    }
    return bytes > UINT32_MAX ? UINT32_MAX : (uint32_t)bytes;
}

/* --- the choice ------------------------------------------------------------------------------------------- */

static void replay(const struct bm_engine *e, int32_t layer, const struct gg_tensor *ids) {
    int64_t nt = ids->ne[1], skipped = e->batch_tokens > nt ? e->batch_tokens - nt : 0;
    int32_t experts = e->layers[layer].experts;
    for (int64_t tok = 0; tok < nt; tok++) {
        int64_t row = (e->batch_first + skipped + tok) % e->replay.n_rows;
        const int32_t *chosen = e->replay.ids + (row * e->n_layers + layer) * e->replay.k;
        for (int64_t k = 0; k < ids->ne[0] && k < e->replay.k; k++)
            if (chosen[k] >= 0) *id_at(ids, k, tok) = chosen[k] % experts;
    }
}

/* Leaves out, for one token, what is not in memory and counts for little; its slot repeats the best expert with
 * weight zero. Marks what was dropped in `marks` (a bit per slot). */
static uint64_t drop(struct bm_engine *e, const struct bm_layer *l, const struct gg_tensor *ids,
                     const struct gg_tensor *weights, int64_t tok) {
    int64_t nu = ids->ne[0], nt = ids->ne[1], best = 0;
    float top = -INFINITY, sum = 0, kept = 0, limit = (float)(e->drop.share / (double)nu);
    uint64_t marks = 0;
    if (nu > 64) return 0;
    for (int64_t k = 0; k < nu; k++) {
        const float *w = weight_at(weights, nu, nt, k, tok);
        if (!w || !isfinite(*w)) return 0;
        sum += *w;
        if (*w > top) top = *w, best = k;
    }
    int32_t best_id = *id_at(ids, best, tok);
    for (int64_t k = 0; k < nu; k++) {
        float w = *weight_at(weights, nu, nt, k, tok);
        int32_t x = *id_at(ids, k, tok);
        if (k != best && w < limit && x >= 0 && x < l->experts && !is_there(e, l, x))
            marks |= (uint64_t)1 << k;
        else
            kept += w;
    }
    for (int64_t k = 0; k < nu; k++) {
        float *w = weight_at(weights, nu, nt, k, tok);
        if (marks >> k & 1) {
            *w = 0;
            *id_at(ids, k, tok) = best_id;
        } else if (marks && e->drop.renormalise && kept > 0) {
            *w *= sum / kept;
        }
    }
    atomic_fetch_add_explicit(&e->counters.dropped, (uint64_t)__builtin_popcountll(marks), memory_order_relaxed);
    return marks;
}

/* A layer's choice is complete: `dst` is its first expert matmul. By the announcer, before it reads the ids. */
void bm_router(struct bm_engine *e, const struct bm_node *node, const struct gg_tensor *dst) {
    const struct bm_tensor *t = &e->tensors[node->tensor];
    const struct bm_layer *l = &e->layers[t->d.layer];
    const struct gg_tensor *ids = dst->src[2], *weights = node->weights;
    int64_t nu = ids->ne[0], nt = ids->ne[1];
    if (e->replay.n_rows) replay(e, t->d.layer, ids);
    bool dropping = e->drop.share > 0 && (e->decode_phase || e->drop.in_prefill);
    if (e->drop.share > 0) atomic_fetch_add_explicit(&e->counters.routed, (uint64_t)(nu * nt), memory_order_relaxed);
    if (!dropping && !e->route.on) return;
    size_t first = e->route.n;
    for (int64_t tok = 0; e->route.on && tok < nt; tok++)
        for (int64_t k = 0; k < nu; k++) {
            int32_t x = *id_at(ids, k, tok);
            struct bm_route_row *row = x >= 0 && x < l->experts ? new_row(e) : NULL;
            if (!row) continue;
            const float *w = weight_at(weights, nu, nt, k, tok);
            int32_t entry = l->first_entry + x;
            bool counted = e->route.counted[entry] == e->route.layers_seen + 1;
            e->route.counted[entry] = e->route.layers_seen + 1;
            *row = (struct bm_route_row){
                .layer = t->d.layer,
                .token = (int32_t)tok,
                .n_tokens = (int32_t)nt,
                .slot = (int32_t)k,
                .expert = x,
                .weight = w ? *w : NAN,
                .residency = residency(e, l, x),
                .read_bytes = counted ? 0 : missing_bytes(e, l, x),
            };
        }
    e->route.layers_seen++;
    for (int64_t tok = 0; dropping && tok < nt; tok++) {
        uint64_t marks = drop(e, l, ids, weights, tok);
        for (size_t i = first; marks && i < e->route.n; i++)
            if (e->route.rows[i].token == tok && e->route.rows[i].slot < 64)
                e->route.rows[i].dropped = marks >> e->route.rows[i].slot & 1;
    }
    if (e->drop.deterministic && dropping)
        for (int64_t tok = 0; tok < nt; tok++)
            for (int64_t k = 0; k < nu; k++) {
                int32_t x = *id_at(ids, k, tok);
                if (x >= 0 && x < l->experts) book(e, l->first_entry + x);
            }
}

/* --- before the weights are gathered --------------------------------------------------------------------- */

/* The layer of the node that sorts a router's scores, or -1. */
int32_t bm_sorted_layer(const struct bm_engine *e, const struct gg_tensor *t) { return bm_named_layer(e, t->name, SORTED); }

/* Experts in memory are preferred: the first places of the sorted order are filled anew. */
void bm_substitute(struct bm_engine *e, int32_t layer, struct gg_tensor *sorted) {
    const struct bm_layer *l = &e->layers[layer];
    const struct gg_tensor *scores = sorted->src[0];
    int64_t n = sorted->ne[0];
    if (scores->type != GG_TYPE_F32 || n != l->experts || scores->ne[0] != n) return;
    for (int64_t tok = 0; tok < sorted->ne[1]; tok++) {
        const char *row = (const char *)scores->data + tok * (int64_t)scores->nb[1];
        int32_t *order = (int32_t *)((char *)sorted->data + tok * (int64_t)sorted->nb[1]);
        float low = INFINITY, high = -INFINITY;
        for (int64_t x = 0; x < n; x++) {
            float s = *(const float *)(row + x * (int64_t)scores->nb[0]);
            if (!isfinite(s)) continue;
            low = s < low ? s : low, high = s > high ? s : high;
        }
        if (!(high > low)) continue;
        float bias = e->substitute * (high - low);
        int32_t k_max = e->top_k < n ? e->top_k : (int32_t)n;
        for (int32_t k = 0; k < k_max; k++) { /* selection: k is small, and this is off by default */
            int64_t best = -1;
            float best_score = -INFINITY;
            for (int64_t i = k; i < n; i++) {
                int32_t x = order[i];
                float s = *(const float *)(row + x * (int64_t)scores->nb[0]);
                if (residency(e, l, x)) s += bias;
                if (s > best_score || best < 0) best = i, best_score = s;
            }
            int32_t taken = order[best];
            if (best != k) {
                memmove(order + k + 1, order + k, (size_t)(best - k) * sizeof *order);
                order[k] = taken;
                if (best >= k_max) atomic_fetch_add_explicit(&e->counters.substituted, 1, memory_order_relaxed);
            }
        }
    }
}

/* --- settings, before the first batch ---------------------------------------------------------------------- */

BM_API int bm_record_routes(struct bm_engine *e) {
    e->route.counted = calloc((size_t)e->n_entries, sizeof *e->route.counted);
    if (!e->route.counted) return -1;
    e->route.on = e->watch_router = true;
    return 0;
}

/* [n_rows][n_layers][k] experts by position in the context, which repeats; -1 leaves the router's. 0 or -1. */
BM_API int bm_set_replay(struct bm_engine *e, const int32_t *ids, int64_t n_rows, int32_t k) {
    size_t bytes = (size_t)n_rows * (size_t)e->n_layers * (size_t)k * sizeof *ids;
    e->replay.ids = malloc(bytes ? bytes : 1);
    if (!e->replay.ids) return -1;
    memcpy(e->replay.ids, ids, bytes);
    e->replay.n_rows = n_rows;
    e->replay.k = k;
    e->watch_router = true;
    return 0;
}

/* `share` of an equal part below which what is not in memory is left out. `capacity` in experts, or 0: by
 * what really is in memory. 0 or -1. */
BM_API int bm_set_drop(struct bm_engine *e, double share, int renormalise, int in_prefill, int32_t capacity) {
    e->drop.share = share, e->drop.renormalise = renormalise, e->drop.in_prefill = in_prefill;
    e->drop.deterministic = capacity > 0, e->drop.capacity = capacity;
    e->drop.booked = calloc((size_t)e->n_entries, 1);
    if (!e->drop.booked) return -1;
    e->watch_router = true;
    return 0;
}

BM_API void bm_set_substitute(struct bm_engine *e, float share, int32_t top_k) {
    e->substitute = share, e->top_k = top_k;
    e->cut_sorted = share > 0;
}

/* Hands the recorded rows over and starts anew. Between batches. */
BM_API size_t bm_routes(struct bm_engine *e, struct bm_route_row **rows) {
    size_t n = e->route.n;
    *rows = e->route.rows;
    e->route.n = 0;
    return n;
}

void bm_routing_free(struct bm_engine *e) {
    free(e->route.rows), free(e->route.counted), free(e->replay.ids), free(e->drop.booked);
}
