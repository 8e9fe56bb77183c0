/* A part of `rebind.c`: places for all that is born in a chunk, as `Chain.pack` in pgraph/template/packing.py
 * finds them. All numbers are those that Python would have; what they mean is told there. */
#include <stdlib.h>

enum { SCAN = 24 }; /* as in packing.py */

typedef struct { /* tables of `Lives`, and the sizes of its regions */
    const int64_t *start, *end, *size, *born, *births, *dying, *deaths;
} pg_chain;

typedef struct {
    int64_t size, since, until, lane, offset;
} pg_rest;

typedef struct { /* in order */
    pg_rest *of;
    int64_t n, room;
} pg_bucket;

typedef struct {
    pg_bucket *buckets;
    int64_t first[65]; /* of each level */
    int64_t n_buckets, least;
    int top, failed;
} pg_idle;

typedef struct { /* a region; carried in, or born in the chunk */
    int64_t size, born, at, r;
} pg_member;

typedef struct { /* a lane, and when it falls idle */
    int64_t at, lane;
} pg_due;

static int bits(int64_t n) { return n ? 64 - __builtin_clzll((unsigned long long)n) : 0; }

static int before(const pg_rest *x, const pg_rest *y)
{
    if (x->size != y->size)
        return x->size < y->size;
    if (x->until != y->until)
        return x->until > y->until;
    if (x->since != y->since)
        return x->since < y->since;
    return x->lane != y->lane ? x->lane < y->lane : x->offset < y->offset;
}

static void add_idle(pg_idle *idle, pg_rest rest)
{
    if (rest.size < idle->least || rest.until <= rest.since)
        return;
    int level = bits(rest.since ^ (rest.until - 1));
    pg_bucket *b = &idle->buckets[idle->first[level] + (rest.since >> level)];
    if (b->n == b->room) {
        int64_t room = b->room ? 2 * b->room : 8;
        pg_rest *more = realloc(b->of, (size_t)room * sizeof(pg_rest));
        if (!more) {
            idle->failed = 1;
            return;
        }
        b->of = more;
        b->room = room;
    }
    int64_t low = 0, high = b->n;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (before(&b->of[middle], &rest))
            low = middle + 1;
        else
            high = middle;
    }
    memmove(&b->of[low + 1], &b->of[low], (size_t)(b->n - low) * sizeof(pg_rest));
    b->of[low] = rest;
    b->n++;
}

/* Whether there is a place of `size` bytes over the nodes [start, end); it is taken. */
static int take_idle(pg_idle *idle, int64_t size, int64_t start, int64_t end, int64_t *lane, int64_t *offset)
{
    pg_bucket *home = NULL;
    int64_t at = 0, room = INT64_MAX;
    for (int level = bits(start ^ (end - 1)); level <= idle->top && room != size; level++) {
        pg_bucket *b = &idle->buckets[idle->first[level] + (start >> level)];
        int64_t low = 0, high = b->n;
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (b->of[middle].size < size)
                low = middle + 1;
            else
                high = middle;
        }
        for (int64_t i = low; i < b->n && i < low + SCAN && b->of[i].size < room; i++)
            if (b->of[i].since <= start && b->of[i].until >= end) {
                home = b, at = i, room = b->of[i].size;
                break;
            }
    }
    if (!home)
        return 0;
    pg_rest best = home->of[at];
    home->n--;
    memmove(&home->of[at], &home->of[at + 1], (size_t)(home->n - at) * sizeof(pg_rest));
    add_idle(idle, (pg_rest){best.size - size, best.since, best.until, best.lane, best.offset + size});
    add_idle(idle, (pg_rest){size, best.since, start, best.lane, best.offset});
    add_idle(idle, (pg_rest){size, end, best.until, best.lane, best.offset});
    *lane = best.lane;
    *offset = best.offset;
    return 1;
}

/* Largest first; of one size, what is carried in before what is born. */
static int in_turn(const void *x, const void *y)
{
    const pg_member *a = x, *b = y;
    if (a->size != b->size)
        return a->size > b->size ? -1 : 1;
    if (a->born != b->born)
        return a->born < b->born ? -1 : 1;
    return (a->at > b->at) - (a->at < b->at);
}

static int sooner(pg_due x, pg_due y) { return x.at != y.at ? x.at < y.at : x.lane < y.lane; }

static void push(pg_due *heap, int64_t n, pg_due due)
{
    for (; n && sooner(due, heap[(n - 1) / 2]); n = (n - 1) / 2)
        heap[n] = heap[(n - 1) / 2];
    heap[n] = due;
}

static pg_due pop(pg_due *heap, int64_t n) /* of `n` that there are */
{
    pg_due top = heap[0], last = heap[--n];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && sooner(heap[child + 1], heap[child]))
            child++;
        if (!sooner(heap[child], last))
            break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return top;
}

/* All members of one chunk in their places. `out`: lanes, places, and where the places begin; then (size, owner)
 * of each lane; then (region, lane, offset). */
static int64_t placed(const pg_chain *c, pg_member *all, int64_t n, pg_due *busy, pg_due *idled, pg_idle *idle,
                      int64_t a, int64_t b, int64_t limit, int64_t held, int64_t *out)
{
    int64_t n_busy = 0, n_idled = 0, n_lanes = 0, *lanes = out + 3, *places = out + out[2];
    out[0] = out[1] = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t r = all[i].r, size = all[i].size, start = c->start[r], end = c->end[r], lane, offset = 0;
        int lends = size >= idle->least, leaves = 1;
        if (!all[i].born) {
            busy[n_busy++] = (pg_due){end, n_lanes}; /* in order of their ends */
            lanes[2 * n_lanes] = size;
            lanes[2 * n_lanes++ + 1] = r;
        } else {
            while (n_busy && busy[0].at <= start) {
                idled[n_idled++] = pop(busy, n_busy);
                n_busy--;
            }
            if (n_idled) {
                pg_due last = idled[--n_idled];
                lane = last.lane;
                if (lends)
                    add_idle(idle, (pg_rest){size, last.at - a, start - a, lane, 0});
            } else if (lends && end <= b && take_idle(idle, size, start - a, end - a, &lane, &offset)) {
                leaves = 0;
            } else {
                held += size;
                if (held > limit)
                    return held;
                lane = n_lanes++;
                lanes[2 * lane] = size;
                lanes[2 * lane + 1] = -1;
                if (lends)
                    add_idle(idle, (pg_rest){size, 0, start - a, lane, 0});
            }
            places[0] = r, places[1] = lane, places[2] = offset;
            places += 3;
            out[1]++;
            if (leaves && end < b)
                push(busy, n_busy++, (pg_due){end, lane});
        }
        out[0] = n_lanes;
        if (i + 1 < n && all[i + 1].size == size)
            continue;
        for (int64_t k = 0; size > idle->least && k < n_busy + n_idled; k++) {
            pg_due due = k < n_busy ? busy[k] : idled[k - n_busy];
            add_idle(idle, (pg_rest){size, due.at - a, b - a, due.lane, 0});
        }
        n_busy = n_idled = 0;
    }
    return held;
}

/* Bytes in use while the chunk [a, b) runs, `held` of them before any is allocated; once they pass `limit`, what
 * is in `out` is unfinished. -1: there is no memory to find out. */
int64_t pg_pack_chunk(const pg_chain *c, int64_t a, int64_t b, int64_t limit, int64_t held, int64_t *out)
{
    int64_t n_born = c->births[b] - c->births[a], n_dying = c->deaths[b] - c->deaths[a + 1], n = 0;
    size_t most = (size_t)(n_born + (n_dying > 0 ? n_dying : 0));
    pg_member *all = malloc((most + 1) * sizeof(pg_member));
    pg_due *dues = malloc(2 * (most + 1) * sizeof(pg_due));
    pg_idle idle = {.least = INT64_MAX, .top = bits(b - a - 1)};
    for (int level = 0; level <= idle.top; level++) {
        idle.first[level] = idle.n_buckets;
        idle.n_buckets += ((b - a - 1) >> level) + 1;
    }
    idle.buckets = calloc((size_t)idle.n_buckets, sizeof(pg_bucket));
    if (all && dues && idle.buckets) {
        for (int64_t i = 0; i < n_born; i++) {
            int64_t r = c->born[c->births[a] + i], size = c->size[r];
            all[n++] = (pg_member){size, 1, i, r};
            if (c->end[r] <= b && 0 < size && size < idle.least)
                idle.least = size;
        }
        for (int64_t i = 0; i < n_dying; i++) {
            int64_t r = c->dying[c->deaths[a + 1] + i];
            if (c->start[r] < a)
                all[n++] = (pg_member){c->size[r], 0, i, r};
        }
        qsort(all, (size_t)n, sizeof(pg_member), in_turn);
        out[2] = 3 + 2 * n;
        held = placed(c, all, n, dues, dues + most + 1, &idle, a, b, limit, held, out);
        for (int64_t i = 0; i < idle.n_buckets; i++)
            free(idle.buckets[i].of);
    } else {
        idle.failed = 1;
    }
    free(idle.buckets);
    free(dues);
    free(all);
    return idle.failed ? -1 : held;
}
