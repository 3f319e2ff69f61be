/* The native half of the pipeline: one boundary, opaque to Python.
 *
 * Ownership: bm_engine owns the residency tables and the scratch of the kernel. The caller owns slot
 * memory, dense memory and the eventfd, and keeps them alive until bm_engine_free, which it calls only
 * after the llama_context that names the engine is gone.
 *
 * Threads: three kinds touch an engine.
 *   compute  llama.cpp's threads inside the kernel: look up, pin, wait, compute, unpin
 *   decode   the thread that calls llama_decode: the eval callback's ask pass, begin and reset
 *   loop     the asyncio loop: takes requests, assigns slots, marks ready, evicts
 * Functions below are marked with the thread that may call them.
 *
 * Presence and protection live in ONE 32-bit word per slice, so looking a slice up and protecting it is
 * a single compare-and-swap, and evicting one that is being used fails instead of racing:
 *   bits 0..1  ABSENT → WANTED (posted to the loop) → READING (has a slot) → READY → ABSENT
 *   bits 2..31 pins: pieces of work that need the slice where it is
 * A pin lasts from the announcement of one matmul to the end of that expert's last piece in it. */
#ifndef BMOE_HOOK_H
#define BMOE_HOOK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ggml_abi.h"

#define BM_API __attribute__((visibility("default")))

enum bm_state { BM_ABSENT = 0, BM_WANTED = 1, BM_READING = 2, BM_READY = 3, BM_STATE_MASK = 3, BM_PIN = 4 };
enum bm_stop { BM_RUN = 0, BM_STOP_CANCEL = 1, BM_STOP_IO = 2, BM_STOP_STALL = 3, BM_STOP_FAULT = 4 };

/* One streamed weight tensor, [ne0, ne1, experts]. */
struct bm_tensor_desc {
    const char *name;
    int32_t layer;       /* dense index of its MoE layer, 0..n_layers */
    int32_t rank;        /* expected order inside the layer, 0 first; the graph's order wins */
    int32_t type;        /* ggml type */
    int32_t experts;
    int32_t first_slice; /* slice id of expert 0 */
    int32_t first_entry; /* entry id of (layer, expert 0) */
    int32_t file;        /* file index */
    int32_t reserved;
    int64_t ne0, ne1;
    uint64_t slice_bytes;
    uint64_t file_offset;
};

/* Counters since bm_engine_new. Written by native threads, read by anyone. */
struct bm_counters {
    _Atomic uint64_t lookups;       /* unique experts looked up, once per layer and graph */
    _Atomic uint64_t hits;          /* of those, all slices were there or on their way */
    _Atomic uint64_t posted;        /* slices asked for */
    _Atomic uint64_t reposted;      /* of those, asked for again at their own matmul */
    _Atomic uint64_t announce_ns;   /* time in announcements */
    _Atomic uint64_t stall_ns;      /* time blocked, summed over compute threads */
    _Atomic uint64_t waits;         /* futex waits */
    _Atomic uint64_t kernel_ns;     /* wall time in the kernel of thread 0 */
    _Atomic uint64_t nodes;         /* matmuls served */
    _Atomic uint64_t announced_at_ns; /* CLOCK_MONOTONIC of the last announcement that posted */
    _Atomic uint64_t rebound;       /* dense tensors pointed at their own memory */
    _Atomic uint64_t ready_wakes;
    _Atomic uint64_t routed;        /* with dropping: choices of the router */
    _Atomic uint64_t dropped;       /* of those, left out */
    _Atomic uint64_t substituted;   /* choices that gave way to an expert in memory */
    _Atomic uint64_t speculated;    /* looked up for the first time after being read unasked */
    _Atomic uint64_t route_committed, route_passed, route_agreed; /* with a route taken ahead: layers; slots */
};

/* The same by layer. */
struct bm_layer_counters {
    _Atomic uint64_t lookups, hits, posted_bytes, stall_ns, kernel_ns;
};

/* One choice of the router, before anything was dropped. */
struct bm_route_row {
    int32_t layer, token, n_tokens, slot, expert;
    float weight;
    uint32_t read_bytes; /* what reading the expert costs; in the first row of it in its batch and layer only */
    uint8_t residency;   /* 0 not there, 1 there, 2 there because it was read before anyone asked */
    uint8_t dropped;
    uint16_t reserved;
};

struct bm_node_row {
    uint64_t wall_ns;
    int64_t major_faults;
    int32_t op, layer;
    char name[GG_MAX_NAME];
};

/* How often a guess was right. Slots are places in the top-k. */
struct bm_prediction {
    uint64_t rows, slots, hits, exact, unscored;
};
enum { BM_GUESS_PREVIOUS, BM_GUESS_STALE, BM_GUESS_STALE_2, BM_GUESS_OWN, BM_GUESS_AHEAD, BM_GUESSES };
enum { BM_MAX_TOP_K = 64, BM_HINTS = 4096 };
struct bm_predict {
    bool on;
    int temporal, stale, log, route_ahead;
    struct { const struct gg_tensor *matrix, *input; } *router; /* [n_layers] */
    float *score;                     /* [experts] */
    void *row;                        /* one input in the matrix's dot type */
    size_t row_cap;
    int32_t *guess[BM_GUESSES];       /* [n_layers][BM_MAX_TOP_K] */
    uint32_t *known[BM_GUESSES];      /* [n_layers] batch clock of the guess, 0 for none */
    struct bm_prediction *stats;      /* [n_layers][BM_GUESSES] */
    uint64_t calls, watched, agreed;
    atomic_int tripped;
    int32_t hints[BM_HINTS];          /* entries: single producer, single consumer */
    _Atomic uint32_t head, tail;
};

enum { BM_TRACE_NODES = 1, BM_TRACE_LAYERS = 2 };
struct bm_node_trace {
    int mode;
    int32_t segment, asked;
    uint64_t since_ns;
    int64_t since_faults;
    struct bm_node_row *rows;
    size_t n, cap;
};

struct bm_layer {
    int32_t n_tensors, learned, next_rank, experts, first_entry;
    int32_t block; /* N of blk.N */
    int32_t order[4]; /* tensor indices in graph order */
};

struct bm_tensor {
    struct bm_tensor_desc d;
    char name[GG_MAX_NAME];
    const struct gg_type_traits_cpu *traits;
    const void *seen_data; /* the weight's address in the mapping, as first seen */
    size_t row_bytes;
    int32_t rank;
    int32_t rank_known;
};

/* A swapped node: what its op_params point at. */
struct bm_node {
    struct bm_engine *engine;
    struct bm_node *next; /* further nodes over the same weight in one graph */
    int32_t tensor;
    int32_t op_params[4]; /* the stock op's own, handed on */
    const struct gg_tensor *weights; /* the router's, when they are watched */
    atomic_uchar claim;   /* 0 free, 1 an announcer is at work, 2 announced */
    bool armed;
};

struct bm_segment {
    uint64_t start, end; /* file range */
    int32_t file;
    int32_t reserved;
    uintptr_t address;
};

struct bm_mapping {
    uintptr_t base;
    uint64_t length;
};

struct bm_repacked; /* dense weights in llama.cpp's own layouts */
struct bm_nest; /* one compute thread's private graph for the stock kernel */

enum { BM_MAX_FILES = 256, BM_MAX_THREADS = 1024 };

/* The matmul being computed; written by its announcer, read by all compute threads. */
struct bm_work {
    int32_t n_unique;
    int32_t tensor;
    int32_t shared_rows; /* several ids use one activation row */
    int32_t convert;     /* activations must be converted to the dot type */
    size_t act_row_bytes;
    int64_t n_ids, n_tokens;
    int32_t *expert;     /* [n_unique] */
    int32_t *row_first;  /* [n_unique] into rows */
    int32_t *row_count;  /* [n_unique] */
    int32_t *chunks;     /* [n_unique] pieces per expert */
    int32_t *chunk_rows; /* [n_unique] weight rows per piece */
    int32_t *rows;       /* [n_ids * n_tokens] id position + token * n_ids, grouped by expert */
    atomic_int *next;    /* [n_unique] */
    atomic_int *done;    /* [n_unique] */
    atomic_uchar *prepared; /* [n_unique] 0, 1 in progress, 2 activations are in place */
    atomic_uchar *converted; /* [activation rows] 0, 1, 2 */
    uint8_t *act;        /* [activation rows] converted rows, shared between experts */
    uint8_t *gathered;   /* [n_ids * n_tokens] converted rows, grouped by expert */
    int32_t *slot_of;    /* [experts] expert to unique index, -1 when not routed */
    size_t cap_ids, cap_rows, cap_act, cap_gathered, cap_experts;
};

struct bm_engine {
    int32_t n_tensors, n_layers, n_slices, n_entries;
    struct bm_tensor *tensors;
    struct bm_layer *layers;
    int32_t *slice_tensor; /* [n_slices] */
    int32_t *entry_layer;  /* [n_entries] */

    _Atomic uint32_t *state;      /* [n_slices] */
    _Atomic uint32_t *want_epoch; /* [n_slices] announcement that last asked for it, 0 none */
    uint8_t **data;               /* [n_slices] first byte of a READY slice */
    uint32_t *phase;              /* [n_slices] where in its slot a slice starts; set once */
    uint64_t *slot_address;       /* [n_slots] set once */
    int32_t *slot;                /* [n_slices] -1 none; loop */
    int32_t *slot_slice;          /* [n_slots] -1 free; loop */
    int32_t n_slots;
    uint8_t *present;             /* [n_entries] slices with a slot; loop */
    uint32_t *last_use;           /* [n_entries] batch clock of the last lookup; announcer */
    double *frequency;            /* [n_entries] aged use count in units of `weight`; announcer */
    double weight, growth;        /* what one use is worth now; its growth per batch */
    _Atomic uint32_t clock;       /* batches begun */
    _Atomic uint32_t epoch;       /* layers announced */
    _Atomic int32_t current_layer;

    int32_t *ring;                /* [ring_cap] posted slices: single producer, single consumer */
    uint32_t ring_cap;
    _Atomic uint32_t ring_head, ring_tail;
    int event_fd;
    atomic_int rung, starved;

    _Atomic uint32_t ready_seq;   /* futex: changes whenever a slice becomes ready or the run stops */
    atomic_int waiters;
    atomic_int stop;
    atomic_int stop_slice;
    uint64_t watchdog_ns;
    int serial;                   /* wait for the whole layer before computing */
    uint32_t delay_seed;          /* tests: random delays at every step of the protocol */

    struct bm_mapping mapping[BM_MAX_FILES];
    int n_files;
    uintptr_t map_low, map_high;
    struct bm_segment *segments;
    int n_segments;
    struct bm_repacked *repacked; /* dense.c; owned by the caller, NULL without */

    struct bm_node **nodes;       /* [n_tensors] */
    struct { const void *key; int32_t tensor; } *weights; /* hash: weight tensor to index */
    uint32_t weights_cap;
    char fault[256];

    /* The router's choice (routing.c) and node times (node_trace.c); all off unless asked for. */
    bool watch_router, cut_sorted, decode_phase;
    const struct gg_tensor *last_weights; /* of the ask pass */
    int64_t batch_first, batch_tokens;    /* position of the batch's first token; how many */
    struct {
        bool on;
        struct bm_route_row *rows;
        size_t n, cap;
        uint64_t lost;
        uint32_t layers_seen;
        uint32_t *counted; /* [n_entries] layers_seen + 1 when its read cost was last counted */
    } route;
    struct {
        int32_t *ids;
        int64_t n_rows;
        int32_t k;
    } replay;
    struct {
        double share;
        bool renormalise, in_prefill, deterministic;
        int32_t capacity, n_booked;
        uint8_t *booked; /* [n_entries] */
    } drop;
    float substitute;
    int32_t top_k;
    struct bm_node_trace node_trace;
    struct bm_predict predict;
    uint8_t *speculative;                    /* [n_entries] read unasked and not yet looked up */
    struct bm_layer_counters *layer_counters; /* [n_layers] */

    struct bm_work work;
    struct bm_nest *nest[BM_MAX_THREADS];
    struct bm_counters counters;
};

extern struct gg_api gg;

/* residency.c, also used by the kernel */
bool bm_announce(struct bm_engine *, int32_t tensor, const int32_t *experts, int32_t n);
void bm_ring(struct bm_engine *);
bool bm_slice_ready(struct bm_engine *, int32_t slice);
void bm_unpin(struct bm_engine *, int32_t slice);
void bm_wait_ready(struct bm_engine *, uint32_t seen, uint64_t *waited_ns, int32_t slice);
void bm_ready_changed(struct bm_engine *);
void bm_stop_now(struct bm_engine *, int why, int32_t slice);
void bm_test_delay(struct bm_engine *);
uint64_t bm_now_ns(void);

/* routing.c */
int32_t bm_named_layer(const struct bm_engine *, const char *name, const char *prefix);
bool bm_is_router_weights(const struct gg_tensor *);
void bm_router(struct bm_engine *, const struct bm_node *, const struct gg_tensor *dst);
int32_t bm_sorted_layer(const struct bm_engine *, const struct gg_tensor *);
void bm_substitute(struct bm_engine *, int32_t layer, struct gg_tensor *sorted);
void bm_routing_free(struct bm_engine *);

/* predict.c */
void bm_note_router(struct bm_engine *, const struct gg_tensor *);
void bm_predict(struct bm_engine *, int32_t layer, const struct gg_tensor *ids);
void bm_commit_route(struct bm_engine *, int32_t layer, struct gg_tensor *sorted);
void bm_predict_free(struct bm_engine *);

/* node_trace.c */
void bm_trace_begin(struct bm_engine *);
bool bm_trace_asks(struct bm_engine *, const struct gg_tensor *);
void bm_trace_node(struct bm_engine *, const struct gg_tensor *);
void bm_node_trace_free(struct bm_engine *);

/* dense.c */
void bm_use_repacked(struct bm_engine *, struct gg_tensor *node);

/* kernel.c */
void bm_kernel(struct gg_tensor *dst, int ith, int nth, void *userdata);
int bm_work_reserve(struct bm_engine *, int64_t n_ids, int64_t n_tokens, int64_t act_rows, size_t row_bytes,
                    int64_t experts);
void bm_work_free(struct bm_engine *);

#endif
