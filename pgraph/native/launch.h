/* What `launch.c` and its parts share: how a launch program lies in memory, and a clock. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef int32_t (*fn_read)(void *tensor, void *result);
typedef int32_t (*fn_delete)(void *tensor);
typedef int32_t (*fn_alloc)(uint64_t nbytes, void **result);
typedef int32_t (*fn_free)(void *memory);
typedef int64_t (*fn_launch)(const void *recipe, void *stream, const uint64_t *bases);
typedef int (*fn_capturing)(void *stream, int *status);
typedef uint64_t (*fn_workspace)(void *stream, uint64_t nbytes);
typedef int64_t (*fn_number)(PyObject *dtype);
typedef PyObject *(*fn_make)(int64_t ndim, const int64_t *layout, int64_t dtype, int64_t device, uint64_t *address);
typedef PyObject *(*fn_alias)(const void *owner, int64_t ndim, const int64_t *layout, int64_t offset, int64_t dtype);

typedef struct { /* a device tensor among the arguments */
    Py_ssize_t position;
    int64_t ndim;
    int64_t *size; /* ndim sizes, then ndim strides, in elements */
    uint64_t mask; /* bits that must be 0 in its address */
} pg_input;

typedef struct { /* a number, and the value that the code was specialized for */
    Py_ssize_t position;
    PyObject *value;
} pg_value;

typedef struct { /* what a function said of an argument when it was captured */
    Py_ssize_t position;
    PyObject *function, *value;
} pg_trait;

typedef struct {
    int64_t region;
    uint64_t offset; /* bytes from the block's first */
} pg_tenant;

typedef struct { /* of a tensor that `tensors.cpp` can make */
    Py_ssize_t ndim;
    int64_t *layout; /* ndim sizes, then ndim strides, in elements; NULL: Python makes it */
} pg_layout;

typedef struct {
    int64_t block;
    PyObject *size, *stride, *dtype;
    pg_layout made;
    int64_t number; /* of the dtype */
    uint64_t raw; /* bytes, where no result lies in it: memory without a tensor; else 0 */
    Py_ssize_t n_tenants;
    pg_tenant *tenants;
} pg_alloc;

typedef struct {
    Py_ssize_t n_allocs, n_frees, n_releases;
    pg_alloc *allocs;
    void *recipe; /* NULL: nothing to launch */
    int64_t *frees, *releases;
} pg_chunk;

enum { CONSTANT, BLOCK, INPUT, RESULT }; /* `Source` of pgraph.launch.program, which checks them */

typedef struct {
    int source;
    Py_ssize_t index;
    PyObject *constant;
    PyObject *make; /* Py_None: the owner itself */
    PyObject *args; /* of `make`, after the owner */
    pg_layout made; /* where `make` is `reinterpret`, or `view` of a block */
    int64_t offset; /* likewise: elements after the owner's first */
    int64_t number; /* of another dtype than the owner's; -1: it is the owner's */
} pg_result;

enum { GUARDS, ALLOCATE, LAUNCH, FREE, RESULTS, N_PHASES };

typedef struct {
    PyObject *source, *calls; /* everything borrowed below is owned by these, and so are the recipes */
    Py_ssize_t n_inputs, n_values, n_traits, n_chunks, n_results, n_regions, n_blocks;
    PyObject *guards;   /* whose inputs, values and traits these are; NULL: the program's own */
    Py_ssize_t suspect; /* the input whose guard failed last: it is looked at first */
    pg_input *inputs;
    pg_value *values;
    pg_trait *traits;
    pg_chunk *chunks;
    pg_result *results;
    PyObject *handles_of, *empty, *failed, *no_workspace, *current_stream, *current_device, *device;
    int64_t workspace; /* its region; -1: there is none */
    uint64_t workspace_nbytes;
    PyTypeObject *tensor_type;
    Py_ssize_t tensor_offset; /* 0: not known, see Note [Handles in place] */
    void *tensor_class;
    long device_index;
    fn_read dim, size, stride, data_ptr;
    fn_delete delete_handle;
    fn_alloc raw_alloc;
    fn_free raw_free;
    fn_launch launch;
    fn_capturing capturing;
    fn_workspace workspace_of;
    fn_number number_of; /* NULL, and so are the next two: there is no `tensors.cpp` */
    fn_make make_tensor;
    fn_alias make_alias;
    int64_t made_on; /* the device, as `make_tensor` takes it */
    PyObject *reinterpret, *view;
    int timed;
    uint64_t spent[N_PHASES]; /* nanoseconds, since timing was switched on */
} pg_program;

enum { VALUE, SIZE, STRIDE }; /* `Number` of pgraph.launch.lookup, which is checked */

typedef struct { /* `Part` of pgraph.launch.lookup */
    int number;
    Py_ssize_t position, dim;
} pg_part;

enum { MOST_PARTS = 16 }; /* of a key; programs that further ones would tell apart are tried in turn */

typedef struct { /* those of one partition, by their sizes */
    PyObject *owners; /* of the programs */
    Py_ssize_t n, n_parts;
    pg_program **programs;
    pg_part *parts;
    int64_t *keys; /* n_parts for each program */
    Py_ssize_t *heads, *next; /* lists of programs whose keys have one hash, in order; -1: the end */
    uint64_t mask; /* of the hashes */
    size_t words;  /* of a frame's memory */
    void *spare;   /* one's, between two calls; NULL while one runs */
} pg_set;

typedef struct { /* of one call */
    PyObject **inputs, **tensors; /* tensors: of the blocks, NULL where the memory is raw or not there */
    void **raw;
    uint64_t *bases;
} pg_frame;

static PyObject *name_data_ptr;

static uint64_t now(const pg_program *p)
{
    struct timespec t;
    if (!p->timed || clock_gettime(CLOCK_MONOTONIC, &t))
        return 0;
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* What has passed since `mark` went into this phase; the next one begins. */
static void spend(pg_program *p, int phase, uint64_t *mark)
{
    if (!p->timed)
        return;
    uint64_t today = now(p);
    p->spent[phase] += today - *mark;
    *mark = today;
}

static const char *CAPSULE = "pgraph.program", *GUARDS_ONLY = "pgraph.guards", *SET = "pgraph.programs";
