/* Which slice is where: presence, protection, requests, readiness, eviction (hook.h has the picture).
 *
 * Liveness, in short. A matmul pins only its own slices, so a layer whose slices outnumber the slots
 * still gets through: finished slices become evictable one by one. Slices of later matmuls of the layer
 * are asked for early but not pinned; `want_epoch` merely asks the loop to spare them, and if one is
 * taken all the same its own matmul asks again. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hook.h"

enum { LONGEST_SLEEP_NS = 100 * 1000 * 1000 };

uint64_t bm_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* Tests stretch every window of the protocol; production pays one predictable branch. */
void bm_test_delay(struct bm_engine *e) {
    if (__builtin_expect(e->delay_seed == 0, 1)) return;
    static _Thread_local uint32_t x;
    if (x == 0) x = e->delay_seed ^ (uint32_t)(uintptr_t)&x;
    x ^= x << 13, x ^= x >> 17, x ^= x << 5;
    if (x % 7 == 0) {
        struct timespec t = {0, (long)(x % 200) * 1000};
        nanosleep(&t, NULL);
    }
}

static void futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void bm_ready_changed(struct bm_engine *e) {
    atomic_fetch_add(&e->ready_seq, 1);
    if (atomic_load(&e->waiters) > 0) {
        futex_wake_all(&e->ready_seq);
        atomic_fetch_add_explicit(&e->counters.ready_wakes, 1, memory_order_relaxed);
    }
}

void bm_ring(struct bm_engine *e) {
    if (atomic_exchange(&e->rung, 1)) return;
    uint64_t one = 1;
    ssize_t n;
    do {
        n = write(e->event_fd, &one, sizeof one);
    } while (n < 0 && errno == EINTR);
}

void bm_stop_now(struct bm_engine *e, int why, int32_t slice) {
    int expected = BM_RUN;
    if (atomic_compare_exchange_strong(&e->stop, &expected, why)) atomic_store(&e->stop_slice, slice);
    bm_ready_changed(e);
    bm_ring(e);
}

/* --- compute threads ------------------------------------------------------------------------------ */

/* A slice can be posted again only after the loop took the first post, so a ring with room for every
 * slice never overflows. */
static void post(struct bm_engine *e, int32_t slice) {
    uint32_t tail = atomic_load_explicit(&e->ring_tail, memory_order_relaxed);
    e->ring[tail % e->ring_cap] = slice;
    atomic_store_explicit(&e->ring_tail, tail + 1, memory_order_release);
}

/* Pins (or only asks for) one slice. Returns its state before. */
static uint32_t want(struct bm_engine *e, int32_t slice, uint32_t pin) {
    uint32_t s = atomic_load(&e->state[slice]);
    for (;;) {
        uint32_t n = s;
        if ((s & BM_STATE_MASK) == BM_ABSENT) n = BM_WANTED | (s & ~(uint32_t)BM_STATE_MASK);
        n += pin;
        bm_test_delay(e);
        if (n == s || atomic_compare_exchange_weak(&e->state[slice], &s, n)) break;
    }
    if ((s & BM_STATE_MASK) == BM_ABSENT) post(e, slice);
    return s & BM_STATE_MASK;
}

/* The routing of one matmul is known: look its experts up, pin their slices, ask for what is missing.
 * The first matmul of a layer asks for the slices of the others too, in the order of use. Returns whether
 * the loop must be rung; the caller does that once other threads can go on, since ringing may hand this
 * core to the loop. */
bool bm_announce(struct bm_engine *e, int32_t tensor, const int32_t *experts, int32_t n) {
    uint64_t t0 = bm_now_ns();
    struct bm_tensor *t = &e->tensors[tensor];
    struct bm_layer *layer = &e->layers[t->d.layer];
    uint32_t posted = 0;
    if (t->rank == 0) {
        uint32_t epoch = atomic_fetch_add(&e->epoch, 1) + 1;
        uint32_t clock = atomic_load_explicit(&e->clock, memory_order_relaxed);
        atomic_store(&e->current_layer, t->d.layer);
        uint32_t hits = 0;
        for (int32_t i = 0; i < n; i++) {
            int32_t entry = layer->first_entry + experts[i];
            bool hinted = e->last_use[entry] == clock;
            e->last_use[entry] = clock;
            e->frequency[entry] += e->weight;
            bool hit = true;
            for (int32_t k = 0; k < layer->n_tensors; k++) {
                int32_t slice = e->tensors[layer->order[k]].d.first_slice + experts[i];
                atomic_store_explicit(&e->want_epoch[slice], epoch, memory_order_relaxed);
                hit &= (atomic_load_explicit(&e->state[slice], memory_order_relaxed) & BM_STATE_MASK) >= BM_READING;
            }
            hits += hit;
            if (e->speculative[entry]) {
                e->speculative[entry] = 0;
                if (hit || hinted) atomic_fetch_add_explicit(&e->counters.speculated, 1, memory_order_relaxed);
            }
        }
        struct bm_layer_counters *lc = &e->layer_counters[t->d.layer];
        atomic_fetch_add_explicit(&lc->lookups, (uint64_t)n, memory_order_relaxed);
        atomic_fetch_add_explicit(&lc->hits, hits, memory_order_relaxed);
        for (int32_t k = 0; k < layer->n_tensors; k++) {
            int32_t first = e->tensors[layer->order[k]].d.first_slice;
            uint32_t before = posted;
            for (int32_t i = 0; i < n; i++)
                posted += want(e, first + experts[i], k == 0 ? BM_PIN : 0) == BM_ABSENT;
            if (posted > before)
                atomic_fetch_add_explicit(&lc->posted_bytes,
                                          (posted - before) * e->tensors[layer->order[k]].d.slice_bytes,
                                          memory_order_relaxed);
        }
        atomic_fetch_add_explicit(&e->counters.lookups, (uint64_t)n, memory_order_relaxed);
        atomic_fetch_add_explicit(&e->counters.hits, hits, memory_order_relaxed);
    } else {
        for (int32_t i = 0; i < n; i++) posted += want(e, t->d.first_slice + experts[i], BM_PIN) == BM_ABSENT;
        atomic_fetch_add_explicit(&e->counters.reposted, posted, memory_order_relaxed);
        if (posted)
            atomic_fetch_add_explicit(&e->layer_counters[t->d.layer].posted_bytes, posted * t->d.slice_bytes,
                                      memory_order_relaxed);
    }
    if (posted) {
        atomic_store_explicit(&e->counters.announced_at_ns, bm_now_ns(), memory_order_relaxed);
        atomic_fetch_add_explicit(&e->counters.posted, posted, memory_order_relaxed);
    }
    atomic_fetch_add_explicit(&e->counters.announce_ns, bm_now_ns() - t0, memory_order_relaxed);
    /* A starving loop must also hear that slices it was sparing are needed now. */
    return posted || atomic_load(&e->starved);
}

bool bm_slice_ready(struct bm_engine *e, int32_t slice) {
    return (atomic_load_explicit(&e->state[slice], memory_order_acquire) & BM_STATE_MASK) == BM_READY;
}

void bm_unpin(struct bm_engine *e, int32_t slice) {
    bm_test_delay(e);
    atomic_store_explicit(&e->want_epoch[slice], 0, memory_order_relaxed);
    uint32_t before = atomic_fetch_sub(&e->state[slice], BM_PIN);
    if (before >> 2 == 1 && atomic_load(&e->starved)) bm_ring(e);
}

/* Sleeps until readiness changes from `seen`. `waited_ns` adds this thread's waits up since anything last
 * became ready; a process that was stopped for an hour has not waited for an hour. */
void bm_wait_ready(struct bm_engine *e, uint32_t seen, uint64_t *waited_ns, int32_t slice) {
    uint64_t t0 = bm_now_ns();
    struct timespec limit = {0, LONGEST_SLEEP_NS};
    bm_test_delay(e);
    atomic_fetch_add(&e->waiters, 1);
    if (!atomic_load(&e->stop)) syscall(SYS_futex, &e->ready_seq, FUTEX_WAIT_PRIVATE, seen, &limit, NULL, 0);
    atomic_fetch_sub(&e->waiters, 1);
    uint64_t t1 = bm_now_ns();
    atomic_fetch_add_explicit(&e->counters.stall_ns, t1 - t0, memory_order_relaxed);
    atomic_fetch_add_explicit(&e->counters.waits, 1, memory_order_relaxed);
    int32_t layer = atomic_load_explicit(&e->current_layer, memory_order_relaxed);
    if (layer >= 0) atomic_fetch_add_explicit(&e->layer_counters[layer].stall_ns, t1 - t0, memory_order_relaxed);
    uint64_t counted = t1 - t0 < 2 * LONGEST_SLEEP_NS ? t1 - t0 : 2 * LONGEST_SLEEP_NS;
    *waited_ns = atomic_load(&e->ready_seq) != seen ? 0 : *waited_ns + counted; /* slow is not stuck */
    if (*waited_ns > e->watchdog_ns) bm_stop_now(e, BM_STOP_STALL, slice);
}

/* --- loop ----------------------------------------------------------------------------------------- */

/* Takes up to `cap` posted slices, oldest first. Clears the doorbell (a non-blocking eventfd) before looking,
 * so that a post after the look rings again. */
BM_API int32_t bm_take(struct bm_engine *e, int32_t *out, int32_t cap) {
    uint64_t rings;
    while (read(e->event_fd, &rings, sizeof rings) < 0 && errno == EINTR) {
    }
    atomic_store(&e->rung, 0);
    bm_test_delay(e);
    uint32_t head = atomic_load_explicit(&e->ring_head, memory_order_relaxed);
    uint32_t tail = atomic_load(&e->ring_tail);
    int32_t n = 0;
    while (head != tail && n < cap) out[n++] = e->ring[head++ % e->ring_cap];
    atomic_store_explicit(&e->ring_head, head, memory_order_release);
    return n;
}

/* Gives WANTED slices their slots. 0, or -1 when one is not WANTED (our bug). */
BM_API int bm_assign(struct bm_engine *e, const int32_t *slices, const int32_t *slots, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        int32_t slice = slices[i], slot = slots[i];
        uint32_t s = atomic_load(&e->state[slice]);
        if ((s & BM_STATE_MASK) != BM_WANTED) return -1;
        e->slot[slice] = slot;
        e->data[slice] = (uint8_t *)e->slot_address[slot] + e->phase[slice];
        bm_test_delay(e);
        while (!atomic_compare_exchange_weak(&e->state[slice], &s, (s & ~3u) | BM_READING)) {
        }
        e->slot_slice[slot] = slice;
        struct bm_tensor *t = &e->tensors[e->slice_tensor[slice]];
        e->present[t->d.first_entry + slice - t->d.first_slice]++;
    }
    return 0;
}

/* The bytes of these slots are complete: their slices are READY. 0, or -1 (our bug). */
BM_API int bm_ready(struct bm_engine *e, const int32_t *slots, int32_t n) {
    int bad = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t slice = e->slot_slice[slots[i]];
        if (slice < 0) {
            bad = -1;
            continue;
        }
        bm_test_delay(e);
        uint32_t s = atomic_load(&e->state[slice]);
        do {
            if ((s & BM_STATE_MASK) != BM_READING) {
                bad = -1;
                break;
            }
        } while (!atomic_compare_exchange_weak(&e->state[slice], &s, (s & ~3u) | BM_READY));
    }
    if (n) bm_ready_changed(e);
    return bad;
}

static void vacate(struct bm_engine *e, int32_t slice) {
    struct bm_tensor *t = &e->tensors[e->slice_tensor[slice]];
    e->slot_slice[e->slot[slice]] = -1;
    e->slot[slice] = -1;
    e->present[t->d.first_entry + slice - t->d.first_slice]--;
}

/* A read that failed for good: the slice is absent again, its pins stay. With `again`, one that is pinned is
 * WANTED instead: the caller reads it anew. Returns whether it is. */
BM_API int bm_abandon(struct bm_engine *e, int32_t slot, int again) {
    int32_t slice = e->slot_slice[slot];
    uint32_t s = atomic_load(&e->state[slice]), n;
    do {
        n = (s & ~3u) | (again && s >= BM_PIN ? BM_WANTED : BM_ABSENT);
    } while (!atomic_compare_exchange_weak(&e->state[slice], &s, n));
    vacate(e, slice);
    return (n & BM_STATE_MASK) == BM_WANTED;
}

/* Gives ABSENT slices slots to be read into before anyone asks. `taken[i]` says which were. Demand that comes
 * later finds them READING. Returns how many. */
BM_API int32_t bm_preload(struct bm_engine *e, const int32_t *slices, const int32_t *slots, int32_t n, uint8_t *taken) {
    int32_t count = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t slice = slices[i];
        struct bm_tensor *t = &e->tensors[e->slice_tensor[slice]];
        uint32_t s = BM_ABSENT;
        taken[i] = 0;
        if (atomic_load(&e->state[slice]) != BM_ABSENT) continue;
        /* Absent: only this thread can make it READY, so nobody reads its address before then. */
        e->data[slice] = (uint8_t *)e->slot_address[slots[i]] + e->phase[slice];
        bm_test_delay(e);
        taken[i] = atomic_compare_exchange_strong(&e->state[slice], &s, BM_READING);
        if (!taken[i]) continue;
        e->slot[slice] = slots[i];
        e->slot_slice[slots[i]] = slice;
        e->present[t->d.first_entry + slice - t->d.first_slice]++;
        e->speculative[t->d.first_entry + slice - t->d.first_slice] = 1;
        count++;
    }
    return count;
}

/* Takes a slice out of its slot unless it is in use or, without `force`, about to be. Returns the slot,
 * or -1. The compare-and-swap of (READY, no pins) is the whole race: a pin that came first fails it, a
 * lookup that comes later finds the slice absent. */
BM_API int32_t bm_evict(struct bm_engine *e, int32_t slice, int force) {
    uint32_t s = BM_READY;
    if (!force && atomic_load_explicit(&e->want_epoch[slice], memory_order_relaxed) == atomic_load(&e->epoch))
        return -1;
    bm_test_delay(e);
    if (!atomic_compare_exchange_strong(&e->state[slice], &s, BM_ABSENT)) return -1;
    int32_t slot = e->slot[slice];
    vacate(e, slice);
    return slot;
}

/* Evicts ranked entries, first to go first, until `want` slots in [first, last) are free or the ranking ends.
 * Skips those used after they were ranked (`used` is the batch clock of their last use then). Writes all freed
 * slots, also those outside the range (at most 4 an entry), and how many entries it went through. */
BM_API int32_t bm_evict_ranked(struct bm_engine *e, const int32_t *entries, const uint32_t *used, int32_t n_entries,
                               int32_t first, int32_t last, int32_t want, int32_t *out, int32_t *consumed) {
    int32_t n = 0, got = 0, i = 0;
    for (; i < n_entries && got < want; i++) {
        int32_t entry = entries[i];
        if (e->last_use[entry] > used[i]) continue;
        struct bm_layer *l = &e->layers[e->entry_layer[entry]];
        for (int32_t k = 0; k < l->n_tensors; k++) {
            int32_t slice = e->tensors[l->order[k]].d.first_slice + entry - l->first_entry;
            int32_t slot = e->slot[slice] < 0 ? -1 : bm_evict(e, slice, 0);
            if (slot < 0) continue;
            out[n++] = slot;
            got += slot >= first && slot < last;
        }
    }
    *consumed = i;
    return n;
}

/* Evicts anything evictable among slots [first, last), for a loop that has run out of better choices:
 * slices nobody is waiting for, then, with `force`, slices of matmuls still to come. */
BM_API int32_t bm_sweep(struct bm_engine *e, int32_t first, int32_t last, int32_t max, int force, int32_t *out) {
    int32_t n = 0;
    for (int pass = 0; pass <= (force ? 1 : 0); pass++)
        for (int32_t slot = first; slot < last && n < max; slot++)
            if (e->slot_slice[slot] >= 0 && bm_evict(e, e->slot_slice[slot], pass) >= 0) out[n++] = slot;
    return n;
}

/* While set, every unpin and announcement rings the loop. Set it, then look once more, then sleep. */
BM_API void bm_set_starved(struct bm_engine *e, int on) {
    bm_test_delay(e);
    atomic_store(&e->starved, on);
    if (on) bm_ready_changed(e); /* a serial announcer waits for "all read or starved" */
}

BM_API void bm_stop(struct bm_engine *e, int why) { bm_stop_now(e, why, -1); }

/* --- decode thread -------------------------------------------------------------------------------- */

/* Before llama_decode: the batch clock advances, uses are worth more than before (the same as all
 * earlier ones ageing), and whatever an aborted batch left on its nodes is cleared. */
BM_API void bm_begin_batch(struct bm_engine *e, int64_t first, int64_t tokens, int decode) {
    e->batch_first = first, e->batch_tokens = tokens, e->decode_phase = decode, e->last_weights = NULL;
    if (e->node_trace.mode) bm_trace_begin(e);
    atomic_fetch_add(&e->clock, 1);
    e->weight *= e->growth;
    if (e->weight > 1e200) {
        for (int32_t i = 0; i < e->n_entries; i++) e->frequency[i] /= e->weight;
        e->weight = 1;
    }
    for (int32_t i = 0; i < e->n_tensors; i++)
        for (struct bm_node *n = e->nodes[i]; n; n = n->next) n->armed = false;
}

/* After llama_decode returned early, when no compute thread is in the kernel: no pins, no requests. Reads
 * in flight stay READING until they are reaped. Called with the loop standing still (on the loop). */
BM_API void bm_reset(struct bm_engine *e) {
    atomic_store(&e->ring_head, atomic_load(&e->ring_tail));
    atomic_store(&e->rung, 0);
    for (int32_t i = 0; i < e->n_slices; i++) {
        uint32_t s = atomic_load(&e->state[i]) & BM_STATE_MASK;
        atomic_store(&e->state[i], s == BM_WANTED ? BM_ABSENT : s);
        atomic_store(&e->want_epoch[i], 0);
    }
    atomic_store(&e->starved, 0);
    atomic_store(&e->stop, BM_RUN);
    atomic_store(&e->stop_slice, -1);
    e->fault[0] = 0;
}

/* --- any thread ----------------------------------------------------------------------------------- */

BM_API int bm_stop_reason(struct bm_engine *e, int32_t *slice) {
    *slice = atomic_load(&e->stop_slice);
    return atomic_load(&e->stop);
}
BM_API uint32_t bm_slice_word(struct bm_engine *e, int32_t slice) { return atomic_load(&e->state[slice]); }
BM_API const char *bm_fault(struct bm_engine *e) { return e->fault; }
BM_API struct bm_counters *bm_get_counters(struct bm_engine *e) { return &e->counters; }
BM_API uint32_t bm_clock(struct bm_engine *e) { return atomic_load(&e->clock); }
BM_API int32_t bm_current_layer(struct bm_engine *e) { return atomic_load(&e->current_layer); }
BM_API uint32_t *bm_last_use(struct bm_engine *e) { return e->last_use; }
BM_API double *bm_frequency(struct bm_engine *e) { return e->frequency; }
BM_API struct bm_layer_counters *bm_layer_counts(struct bm_engine *e) { return e->layer_counters; }
BM_API uint8_t *bm_speculative(struct bm_engine *e) { return e->speculative; }
BM_API uint8_t *bm_present(struct bm_engine *e) { return e->present; }
BM_API uint64_t *bm_slot_address(struct bm_engine *e) { return e->slot_address; }
BM_API uint32_t *bm_phase(struct bm_engine *e) { return e->phase; }
BM_API int32_t *bm_slot_slice(struct bm_engine *e) { return e->slot_slice; }

/* --- tests: the compute side, one step at a time ---------------------------------------------------- */

BM_API void bm_test_announce(struct bm_engine *e, int32_t tensor, const int32_t *experts, int32_t n) {
    if (bm_announce(e, tensor, experts, n)) bm_ring(e);
}
BM_API int bm_test_ready(struct bm_engine *e, int32_t slice) { return bm_slice_ready(e, slice); }
BM_API void bm_test_unpin(struct bm_engine *e, int32_t slice) { bm_unpin(e, slice); }
BM_API void *bm_test_data(struct bm_engine *e, int32_t slice) { return e->data[slice]; }
BM_API void bm_test_delays(struct bm_engine *e, uint32_t seed) { e->delay_seed = seed; }
