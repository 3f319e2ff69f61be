/* The time of every node, or of every layer: the graph is cut there and the clock is read.
 *
 * A node that answers yes in the ask pass is computed up to and including itself, then seen again. Slower and
 * not the way a run goes without it: such runs are marked. */
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "hook.h"

static int64_t faults(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_majflt;
}

static int32_t block_of(const char *name) {
    const char *dash = strrchr(name, '-');
    if (!dash || dash[1] < '0' || dash[1] > '9') return -1;
    char *end;
    long n = strtol(dash + 1, &end, 10);
    return *end ? -1 : (int32_t)n;
}

/* What comes after the last layer: its nodes are called result_norm and result_output. */
static bool is_result(const char *name) { return !strncmp(name, "result_", 7); }

static void row(struct bm_engine *e, const char *name, int32_t op, int32_t layer) {
    struct bm_node_trace *r = &e->node_trace;
    if (r->n == r->cap) {
        size_t cap = r->cap ? 2 * r->cap : 4096;
        struct bm_node_row *grown = realloc(r->rows, cap * sizeof *grown);
        if (!grown) return;
        r->rows = grown, r->cap = cap;
    }
    uint64_t now = bm_now_ns();
    int64_t faulted = faults();
    struct bm_node_row *x = &r->rows[r->n++];
    memset(x, 0, sizeof *x);
    x->wall_ns = now - r->since_ns, x->major_faults = faulted - r->since_faults, x->op = op, x->layer = layer;
    strncpy(x->name, name, sizeof x->name - 1);
    r->since_ns = bm_now_ns(), r->since_faults = faulted;
}

void bm_trace_begin(struct bm_engine *e) {
    e->node_trace.segment = e->node_trace.asked = -1;
    e->node_trace.since_faults = faults();
    e->node_trace.since_ns = bm_now_ns();
}

/* In the ask pass: whether to stop after this node. */
bool bm_trace_asks(struct bm_engine *e, const struct gg_tensor *t) {
    struct bm_node_trace *r = &e->node_trace;
    if (r->mode == BM_TRACE_NODES) return true;
    int32_t block = is_result(t->name) ? INT32_MAX : block_of(t->name);
    if (block < 0 || block <= r->asked) return false;
    r->asked = block;
    return true;
}

/* A node at which the graph was cut is computed. */
void bm_trace_node(struct bm_engine *e, const struct gg_tensor *t) {
    struct bm_node_trace *r = &e->node_trace;
    int32_t block = block_of(t->name);
    if (r->mode == BM_TRACE_NODES) {
        row(e, t->name, t->op, block);
        return;
    }
    if (is_result(t->name)) block = INT32_MAX;
    if (block > r->segment) {
        row(e, r->segment < 0 ? "pre" : "blk", -1, r->segment);
        r->segment = block;
    }
}

/* 1 every node, 2 every layer. */
BM_API void bm_trace_nodes(struct bm_engine *e, int mode) { e->node_trace.mode = mode; }

/* After llama_decode: closes the last segment and hands the rows over. */
BM_API size_t bm_node_rows(struct bm_engine *e, struct bm_node_row **rows) {
    struct bm_node_trace *r = &e->node_trace;
    if (r->mode == BM_TRACE_LAYERS) row(e, "post", -1, -1);
    size_t n = r->n;
    *rows = r->rows;
    r->n = 0;
    return n;
}

void bm_node_trace_free(struct bm_engine *e) { free(e->node_trace.rows); }
