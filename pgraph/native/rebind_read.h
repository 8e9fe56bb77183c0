/* All nodes of a captured graph, read at once: a part of rebind.c.
 *
 * pg_read_nodes: types, and the parameters of kernels.
 * pg_read_kept: what an exec keeps of kernels.
 * pg_pack_all: the parameters of all kernels, gathered.
 * pg_suspects: which of their words may be addresses.
 * pg_count: the nodes of a capture under way (Note [Counted along the path] in pgraph/drivers/cuda/counts.py).
 */

typedef int (*fn_get)(void *node, void *found);
typedef int (*fn_function)(void **function, void *kernel);
typedef int (*fn_attribute)(void *node, int attribute, void *value);
typedef int (*fn_demand)(int *value, int attribute, void *function);

typedef struct {
    fn_get type;
    fn_get kernel;
    fn_function function;
    fn_attribute attribute;
    fn_demand demand;
} pg_readers;

typedef struct {
    int32_t type;
    int32_t code; /* CUresult of the first call that failed; what follows means nothing then */
    /* CUDA_KERNEL_NODE_PARAMS_v2: of a kernel only */
    void *function;
    uint32_t grid[3], block[3], shared;
    const void *const *params;
    const uint64_t *extra;
    void *kernel;
    void *ctx;
    /* the buffer that `extra` tells of, where there are no params */
    const void *buffer;
    uint64_t nbytes;
} pg_read;

enum { KERNEL_NODE = 0, LIST_END = 0, LIST_BUFFER = 1, LIST_SIZE = 2 }; /* as the driver numbers them */

static int read_kernel(const pg_readers *calls, void *node, pg_read *found)
{
    int rc = calls->kernel(node, &found->function);
    if (!rc && !found->function && found->kernel)
        rc = calls->function(&found->function, found->kernel);
    if (rc || found->params || !found->extra)
        return rc;
    for (const uint64_t *item = found->extra; item[0] != LIST_END; item += 2) {
        if (item[0] == LIST_BUFFER)
            found->buffer = (const void *)(uintptr_t)item[1];
        else if (item[0] == LIST_SIZE)
            found->nbytes = *(const size_t *)(uintptr_t)item[1];
    }
    return 0;
}

/* found: zeros. */
void pg_read_nodes(const pg_readers *calls, void *const *nodes, int64_t count, pg_read *found)
{
    for (int64_t i = 0; i < count; i++) {
        found[i].code = calls->type(nodes[i], &found[i].type);
        if (!found[i].code && found[i].type == KERNEL_NODE)
            found[i].code = read_kernel(calls, nodes[i], &found[i]);
    }
}

typedef struct {
    int32_t attribute;
    int32_t nbytes; /* of its value */
    int32_t needed; /* 0 where drivers need not know it */
} pg_attribute;

enum { VALUE_BYTES = 64 }; /* sizeof(CUlaunchAttributeValue) */

/* Of functions that were met already: what has their demands, in a place that the handle tells. */
enum { MET_BITS = 6 };
#define SPREAD UINT64_C(0x9E3779B97F4A7C15) /* 2^64 over the golden ratio: Fibonacci hashing, as Knuth has it */

typedef struct {
    void *function;
    const char *demands;
} pg_met;

static int read_demands(const pg_readers *calls, void *function, const int32_t *demands, int64_t n_demands,
                        pg_met *met, char *row)
{
    const size_t nbytes = (size_t)n_demands * sizeof(int);
    pg_met *place = &met[(uint64_t)(uintptr_t)function * SPREAD >> (64 - MET_BITS)];
    if (place->demands && place->function == function) {
        memcpy(row, place->demands, nbytes);
        return 1;
    }
    for (int64_t i = 0; i < n_demands; i++) {
        int value = 0;
        if (calls->demand(&value, demands[i], function))
            return 0;
        memcpy(row + (size_t)i * sizeof value, &value, sizeof value);
    }
    *place = (pg_met){function, row};
    return 1;
}

static int read_attributes(const pg_readers *calls, void *node, const pg_attribute *wanted, int64_t n_wanted,
                           char *row)
{
    for (int64_t i = 0; i < n_wanted; i++) {
        uint64_t value[VALUE_BYTES / 8] = {0};
        int known = !calls->attribute(node, wanted[i].attribute, value);
        if (!known && wanted[i].needed)
            return 0;
        *row++ = (char)known;
        if (known)
            memcpy(row, value, (size_t)wanted[i].nbytes);
        row += wanted[i].nbytes;
    }
    return 1;
}

/* One row for each node: a byte that is 1 if all was read that is needed, the demands, and for each attribute a byte
 * that is 1 if it is known, and its value. rows: zeros; those of nodes that are no kernels, or that could not be read,
 * stay so. Most functions are asked once for their demands, however many nodes launch them. */
void pg_read_kept(const pg_readers *calls, void *const *nodes, int64_t count, const pg_read *read,
                  const pg_attribute *wanted, int64_t n_wanted, const int32_t *demands, int64_t n_demands, char *rows,
                  int64_t row_bytes)
{
    pg_met met[1 << MET_BITS] = {{NULL, NULL}};
    for (int64_t i = 0; i < count; i++, rows += row_bytes) {
        if (read[i].code || read[i].type != KERNEL_NODE)
            continue;
        char *behind = rows + 1 + (size_t)n_demands * sizeof(int);
        *rows = read_demands(calls, read[i].function, demands, n_demands, met, rows + 1) &&
                read_attributes(calls, nodes[i], wanted, n_wanted, behind);
    }
}

typedef struct {
    const void *from;       /* the list of pointers to parameters, or bytes */
    const uint64_t *layout; /* as pg_pack takes it; none for bytes */
    uint64_t count;         /* of parameters, or of bytes */
    uint64_t at;            /* where they go */
} pg_packing;

void pg_pack_all(char *data, const pg_packing *all, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        if (all[i].layout)
            pg_pack(data + all[i].at, all[i].from, all[i].layout, (int64_t)all[i].count);
        else
            memcpy(data + all[i].at, all[i].from, all[i].count);
    }
}

typedef struct {
    int32_t node, word;
    uint64_t first, second;
} pg_suspect;

typedef struct {
    uint64_t low, high; /* [low, high) */
} pg_span;

/* The words that differ, or lie in one of the spans; returns their number.
 *
 * ends: of each node, how many words there are up to its last. found: room for all words. */
int64_t pg_suspects(const uint64_t *first, const uint64_t *second, const int64_t *ends, int64_t n_nodes,
                    const pg_span *spans, int64_t n_spans, pg_suspect *found)
{
    pg_suspect *next = found;
    int64_t at = 0;
    for (int64_t node = 0; node < n_nodes; node++) {
        const int64_t begin = at;
        for (; at < ends[node]; at++) {
            const uint64_t value = first[at];
            int suspect = value != second[at];
            for (int64_t i = 0; i < n_spans; i++)
                suspect |= spans[i].low <= value && value < spans[i].high;
            if (suspect)
                *next++ = (pg_suspect){(int32_t)node, (int32_t)(at - begin), value, second[at]};
        }
    }
    return next - found;
}

typedef int (*fn_info)(void *stream, int *status, uint64_t *id, void **graph, void *const **ends, size_t *count);
typedef int (*fn_near)(void *node, void **found, void *edge_data, size_t *count);

typedef struct {
    fn_info info;
    fn_near before;
    fn_near behind;
    void *stream;
    void *end;     /* of the path when it was walked last; none before the first node */
    int64_t count; /* of its nodes */
} pg_path;

enum { CAPTURE_ACTIVE = 1 };

/* Returns the number of nodes on the path to the stream's next node; -1 if there is not one path, or a node waits for
 * its end. */
int64_t pg_count(pg_path *p)
{
    int status = 0;
    uint64_t id = 0;
    void *graph = NULL, *const *ends = NULL;
    size_t n = 0;
    if (p->info(p->stream, &status, &id, &graph, &ends, &n) || status != CAPTURE_ACTIVE || n != 1)
        return -1;
    void *end = ends[0];
    if (p->behind(end, NULL, NULL, &n) || n)
        return -1;
    int64_t count = p->count;
    for (void *node = end; node != p->end; count++) {
        void *found[2] = {NULL, NULL};
        uint64_t edge_data[2] = {0, 0};
        n = 2;
        if (p->before(node, found, edge_data, &n) || n > 1 || (!n && p->end))
            return -1;
        node = n ? found[0] : NULL;
    }
    p->end = end;
    p->count = count;
    return count;
}
