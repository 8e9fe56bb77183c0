/* The loops that Python is too slow, or not allowed, to run.
 *
 * pg_launch: compare every slot with today's address, set the nodes that changed, launch.
 * pg_ghost_alloc / pg_ghost_free: the allocator of the ghost memory pool. It is called with the
 * caching allocator's mutex held; a Python callback there would wait for the interpreter lock
 * while another thread may hold that lock and wait for the mutex (Note [Ghost allocator lock order]).
 *
 * pg_pack: the parameters of one kernel, gathered. All nodes of a graph at once: rebind_read.h.
 * pg_pack_chunk: places in blocks: rebind_plan.h.
 *
 * No CUDA header and no link against libcuda: Python hands over the driver's function pointers.
 */
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int (*fn_set_params)(void *exec, void *node, const void *params);
typedef int (*fn_set_copy)(void *exec, void *node, const void *params, void *ctx);
typedef int (*fn_launch)(void *exec, void *stream);

typedef struct {
    fn_set_params kernel;
    fn_set_copy copy;
    fn_set_copy fill;
    fn_launch launch;
} pg_calls;

enum { KERNEL, MEMCPY, MEMSET, FIXED }; /* FIXED: never set */

typedef struct {
    int64_t kind;
    void *node; /* the node in the graph that the exec was made from */
} pg_node;

enum { HEAD = 36 }; /* bytes of a kernel's struct that hold its function, dimensions and shared memory */

typedef struct { /* what a node was set to last: Note [Only what differs] in pgraph/drivers/execs.py */
    int64_t words; /* of parameters; -1: nobody knows what it was set to */
    int64_t room;  /* words that there is place for */
    char head[40];
    uint64_t params[];
} pg_held;

typedef struct {
    const pg_calls *calls;
    void *exec;
    void *ctx;
    const pg_node *nodes;
    int64_t n_nodes;
    int64_t held; /* the recipe that all nodes were set to last, and none was set otherwise since; 0: nobody knows */
    int64_t busy; /* 1 while a thread sets and launches: what it set must be what it launches */
    pg_held *const *contents; /* of each node; NULL while there is one recipe only */
} pg_exec;

typedef struct {
    int32_t params; /* index into words of the struct that the setter takes */
    int32_t last;   /* slots before this one are of this node or an earlier one */
    int32_t first;  /* index into words of the kernel's, copy's or fill's own parameters */
    int32_t count;  /* words of them */
} pg_setting;

typedef struct {
    int32_t word;   /* index into words */
    int32_t region; /* index into bases */
    int64_t delta;
} pg_slot;

typedef struct { /* what one specialization has an exec do: Note [Shared execs] in pgraph/drivers/execs.py */
    pg_exec *exec;
    int64_t number; /* no other recipe has, or had, the same; not 0 */
    const pg_setting *settings; /* of each node of the exec */
    const pg_slot *slots;
    uint64_t *words;
    struct pg_turns *turns; /* NULL: it serves all its launches; else see rebind_turns.h */
} pg_recipe;

static int set(const pg_exec *e, const pg_node *n, void *params)
{
    if (n->kind == KERNEL)
        return e->calls->kernel(e->exec, n->node, params);
    return (n->kind == MEMCPY ? e->calls->copy : e->calls->fill)(e->exec, n->node, params, e->ctx);
}

static void *params_of(const pg_recipe *r, const pg_setting *s) { return r->words + s->params; }

static int holds(const pg_held *h, const pg_node *n, const pg_recipe *r, const pg_setting *s)
{
    return h->words == s->count && (n->kind != KERNEL || !memcmp(h->head, params_of(r, s), HEAD)) &&
           !memcmp(h->params, r->words + s->first, 8 * (size_t)s->count);
}

static void note(pg_held *h, const pg_node *n, const pg_recipe *r, const pg_setting *s)
{
    h->words = s->count <= h->room ? s->count : -1;
    if (h->words < 0)
        return;
    if (n->kind == KERNEL)
        memcpy(h->head, params_of(r, s), HEAD);
    memcpy(h->params, r->words + s->first, 8 * (size_t)s->count);
}

/* Sets a node, and remembers to what. After a failure nothing is known of any node. */
static int set_and_note(pg_exec *e, const pg_recipe *r, int64_t i)
{
    const pg_node *n = &e->nodes[i];
    int rc = set(e, n, params_of(r, &r->settings[i]));
    if (rc)
        e->held = 0;
    if (!e->contents)
        return rc;
    if (!rc)
        note(e->contents[i], n, r, &r->settings[i]);
    for (int64_t k = 0; rc && k < e->n_nodes; k++)
        e->contents[k]->words = -1;
    return rc;
}

static int64_t set_and_launch(pg_exec *e, const pg_recipe *r, void *stream, const uint64_t *bases)
{
    int64_t count = 0, s = 0;
    int anew = e->held != r->number;
    for (int64_t i = 0; i < e->n_nodes; i++) {
        const pg_node *n = &e->nodes[i];
        int changed = 0;
        for (; s < r->settings[i].last; s++) {
            uint64_t value = bases[r->slots[s].region] + (uint64_t)r->slots[s].delta;
            uint64_t *word = &r->words[r->slots[s].word];
            if (*word != value) {
                *word = value;
                changed = 1;
            }
        }
        if (anew)
            changed = n->kind != FIXED && !(e->contents && holds(e->contents[i], n, r, &r->settings[i]));
        if (!changed)
            continue;
        count++;
        int rc = set_and_note(e, r, i);
        if (rc)
            return -rc;
    }
    e->held = r->number;
    int rc = e->calls->launch(e->exec, stream);
    return rc ? -rc : count;
}

static void take(pg_exec *e)
{
    while (__atomic_exchange_n(&e->busy, 1, __ATOMIC_ACQUIRE))
        sched_yield();
}

static void give(pg_exec *e) { __atomic_store_n(&e->busy, 0, __ATOMIC_RELEASE); }

#include "rebind_turns.h"

/* Returns the number of nodes set, or minus the CUresult of the first call that failed. */
int64_t pg_launch(const pg_recipe *r, void *stream, const uint64_t *bases)
{
    take(r->exec);
    const pg_recipe *one = r->turns ? whose_turn(r, bases) : r;
    int64_t result = set_and_launch(one->exec, one, stream, bases);
    give(r->exec);
    return result;
}

/* From now on launches take turns as these say; NULL: no more. Nobody uses what they took before. */
void pg_take_turns(pg_recipe *r, pg_turns *turns)
{
    take(r->exec);
    r->turns = turns;
    give(r->exec);
}

/* Sets all kernels as this recipe has them, and launches nothing. Returns 0, or the CUresult of the first one
 * that the exec does not take. */
int64_t pg_fits(const pg_recipe *r)
{
    pg_exec *e = r->exec;
    int rc = 0;
    take(e);
    e->held = 0;
    for (int64_t i = 0; !rc && i < e->n_nodes; i++)
        if (e->nodes[i].kind == KERNEL)
            rc = set_and_note(e, r, i);
    give(e);
    return rc;
}

/* Copies a kernel's parameters into one buffer: the i-th, which pointers[i] points to, has layout[2 * i + 1] bytes
 * and goes to data + layout[2 * i]. */
void pg_pack(char *data, const void *const *pointers, const uint64_t *layout, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(data + layout[2 * i], pointers[i], layout[2 * i + 1]);
}

#include "rebind_plan.h"
#include "rebind_read.h"

/* Clears the stack below the caller. Ops leave padding in their kernels' parameter structs as they find
 * it; without old addresses lying about there, fewer captures are ambiguous. */
void pg_scrub_stack(void)
{
    char old[96 << 10];
    memset(old, 0, sizeof old);
    __asm__ volatile("" : : "r"(old) : "memory"); /* nobody reads it, but it is to be written */
}

typedef int (*fn_map)(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags);
typedef int (*fn_access)(uint64_t address, size_t size, const void *desc, size_t count);

typedef struct {
    uint64_t low;      /* first address of the reserved range */
    uint64_t high;     /* one past its end */
    uint64_t position; /* next free address: it only grows, so no address is ever reused */
    uint64_t mapped;   /* everything below is mapped */
    uint64_t chunk;    /* bytes of the one physical allocation that is mapped again and again */
    uint64_t handle;   /* that allocation */
    uint64_t guard;    /* bytes left free on either side of each range */
    uint64_t unit;     /* addresses are rounded up to it */
    uint64_t further;  /* and moved on by so much: Note [Two layouts] in pgraph/drivers/interface.py */
    uint64_t ahead;    /* bytes mapped beyond what is needed, whenever some are: each time takes 0.1 ms */
    uint64_t count;    /* ranges handed out */
    int64_t error;     /* first CUresult other than 0; nothing is taken after it */
    fn_map map;
    fn_access access;
    const void *desc;  /* CUmemAccessDesc */
} pg_arena;

static pg_arena *active; /* guarded by pgraph's capture lock */

void pg_arena_activate(pg_arena *arena) { active = arena; }

/* Takes `size` bytes where `next_start` of pgraph/drivers/interface.py says; 0 when the range is used up. */
uint64_t pg_arena_take(pg_arena *a, uint64_t size, uint64_t phase)
{
    uint64_t start = (a->position + a->guard + a->unit - 1) / a->unit * a->unit + a->further + phase;
    uint64_t end = start + size + a->guard;
    if (end > a->high)
        return 0;
    uint64_t first = a->mapped, wanted = first < end ? end + a->ahead : first;
    int rc = a->error ? (int)a->error : 0; /* what was mapped then may have no access */
    while (!rc && (a->mapped < end || (a->mapped < wanted && a->mapped + a->chunk <= a->high))) {
        rc = a->map(a->mapped, a->chunk, 0, a->handle, 0);
        if (!rc)
            a->mapped += a->chunk;
    }
    if (!rc && a->mapped > first)
        rc = a->access(first, a->mapped - first, a->desc, 1); /* once for all: it takes longer than to map */
    if (rc) {
        a->error = rc;
        return 0;
    }
    a->position = end;
    a->count++;
    return start;
}

void *pg_ghost_alloc(int64_t size, int device, void *stream)
{
    (void)device;
    (void)stream;
    return active ? (void *)(uintptr_t)pg_arena_take(active, (uint64_t)size, 0) : NULL;
}

void pg_ghost_free(void *ptr, int64_t size, int device, void *stream)
{
    (void)ptr; /* the whole range is unmapped at once when the capture is over */
    (void)size;
    (void)device;
    (void)stream;
}

/* Sizes of the structs that Python fills, in bytes, in the order of pgraph.native.structs. */
int64_t pg_struct_size(int64_t which)
{
    switch (which) {
    case 0: return sizeof(pg_calls);
    case 1: return sizeof(pg_node);
    case 2: return sizeof(pg_exec);
    case 3: return sizeof(pg_setting);
    case 4: return sizeof(pg_slot);
    case 5: return sizeof(pg_recipe);
    case 6: return sizeof(pg_arena);
    case 7: return sizeof(pg_readers);
    case 8: return sizeof(pg_read);
    case 9: return sizeof(pg_packing);
    case 10: return sizeof(pg_path);
    case 11: return sizeof(pg_held);
    case 12: return sizeof(pg_turns);
    default: return -1;
    }
}
