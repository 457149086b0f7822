/* Whole attention calls for _launch.c: `call` reads and checks the tensors (_read.h) and, where a route is kept for such a
   call, launches what it says; else what was read goes back to Python, which decides, launches, and keeps a route. A route is
   a row of the dispatch table on one stream: the box of bounds that it is for, its kernels, and the workspace of the stream. */
#ifndef SPECGEN_ROUTES_H
#define SPECGEN_ROUTES_H
#include "_read.h"
#include "_tensor_maps.h"

#define ROUTES "_launch.Routes"
/* Of one reader: devices, their streams, rows in use, of which a measured table may have 200. Calls beyond are launched from Python. */
#define MAX_ROUTES 256

typedef struct kernel kernel_t;
static kernel_t *kernel_of(PyObject *callable);
static int launch_slots(const kernel_t *kernel, unsigned grid, void *stream, const slot_t *slots);
static Py_ssize_t argument_count(const kernel_t *kernel);

enum { DECODE, PREFILL, KERNELS };                 /* in the order of their launches */
enum { PLAIN = READ_ARGUMENTS, CALL_ARGUMENTS };   /* of `call`, after those of _read.h */
enum { SCRATCH = 5, SLOTS = TENSORS + 1 + SCRATCH + 5 + STRIDES, SINK_SLOTS = 3 }; /* arguments._ATTENTION, _SINKS */

typedef struct {
    long long device, low[BOUNDS], high[BOUNDS];
    unsigned long long stream, scratch[SCRATCH]; /* a workspace's addresses, in its order */
    int aligned;
    const kernel_t *kernels[KERNELS]; /* NULL: none */
    PyObject *owners[KERNELS];        /* what keeps a kernel alive, or NULL */
    unsigned grids[KERNELS];
} route_t;

typedef struct {
    reader_t reader;
    PyObject *current_stream, *new_empty; /* current_stream(device index) -> handle; the name */
    int count, last; /* routes that are kept; the one of the last call, which is tried first */
    route_t routes[MAX_ROUTES];
} routes_t;

static PyObject *nothing(void) {
    Py_IncRef(Py_None);
    return Py_None;
}

static PyObject *ints(const int64_t *numbers, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count), *number;
    Py_ssize_t i;
    for (i = 0; tuple != NULL && i < count; i++) {
        number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL || PyTuple_SetItem(tuple, i, number) != 0) {
            Py_DecRef(tuple);
            return NULL;
        }
    }
    return tuple;
}

static PyObject *read_for_python(const call_t *call) {
    const int64_t numbers[] = {call->device, call->aligned, call->max_pages, call->pages};
    PyObject *parts[] = {ints(numbers, 4), ints(call->bounds, BOUNDS), ints(call->addresses, TENSORS),
                         ints(call->strides, STRIDES)};
    PyObject *whole = NULL;
    int i;
    if (parts[0] != NULL && parts[1] != NULL && parts[2] != NULL && parts[3] != NULL)
        whole = PyTuple_Pack(4, parts[0], parts[1], parts[2], parts[3]);
    for (i = 0; i < 4; i++)
        Py_DecRef(parts[i]);
    return whole;
}

/* The kernels of a copy of a route are held while it is in use: other threads may make the reader forget it meanwhile. */
static void hold(const route_t *route) {
    int i;
    for (i = 0; i < KERNELS; i++)
        Py_IncRef(route->owners[i]);
}

static void let_go(const route_t *route) {
    int i;
    for (i = 0; i < KERNELS; i++)
        Py_DecRef(route->owners[i]);
}

/* 1 with the route of a call, held; 0 where none is kept; -1 with an error set where the stream cannot be read. */
static int find_route(routes_t *kept, const call_t *call, route_t *route) {
    unsigned long long stream;
    PyObject *index, *handle;
    int i, k, n;

    if (kept->count == 0)
        return 0;
    index = PyLong_FromLongLong(call->device);
    handle = index == NULL ? NULL : PyObject_CallFunctionObjArgs(kept->current_stream, index, NULL);
    Py_DecRef(index);
    if (handle == NULL)
        return -1;
    stream = PyLong_AsUnsignedLongLong(handle);
    Py_DecRef(handle);
    if (stream == (unsigned long long)-1 && PyErr_Occurred())
        return -1;
    for (n = 0, i = kept->last; n < kept->count; n++, i = i + 1 < kept->count ? i + 1 : 0) {
        const route_t *each = &kept->routes[i];
        if (each->device != call->device || each->stream != stream || each->aligned != call->aligned)
            continue;
        for (k = 0; k < BOUNDS && each->low[k] <= call->bounds[k] && call->bounds[k] <= each->high[k]; k++)
            ;
        if (k == BOUNDS) {
            kept->last = i;
            *route = *each;
            hold(route);
            return 1;
        }
    }
    return 0;
}

/* The output that a caller did not give; its address goes into `call`. */
static PyObject *make_out(const routes_t *kept, PyObject *q, call_t *call) {
    const int64_t sizes[] = {call->bounds[TOKENS], kept->reader.query_heads, kept->reader.v_dim};
    PyObject *shape = ints(sizes, 3), *out = NULL;
    dl_tensor made;
    if (shape != NULL)
        out = PyObject_CallMethodObjArgs(q, kept->new_empty, shape, NULL);
    Py_DecRef(shape);
    if (out != NULL && kept->reader.read(out, &made) != 0) {
        Py_DecRef(out);
        return NULL;
    }
    if (out != NULL)
        call->addresses[OUT] = (int64_t)(intptr_t)made.data;
    return out;
}

/* Launches the kernels of a route. 0, or -1 with an error set. */
static int launch_route(const route_t *route, const call_t *call, int has_sinks) {
    slot_t slots[SLOTS + SINK_SLOTS], *slot = slots;
    const int64_t any = (int64_t)route->scratch[1]; /* for a pointer that nobody follows */
    int i, code = 0;

    for (i = 0; i < TENSORS; i++)
        (slot++)->i64 = call->addresses[i];
    (slot++)->i64 = any; /* lse */
    for (i = 0; i < SCRATCH; i++)
        (slot++)->i64 = (int64_t)route->scratch[i];
    (slot++)->i64 = call->bounds[SEQS];
    (slot++)->i64 = call->max_pages;
    (slot++)->i64 = 0; /* store_lse */
    (slot++)->i64 = call->bounds[TOKENS];
    (slot++)->i64 = call->pages;
    for (i = 0; i < STRIDES; i++)
        (slot++)->i64 = call->strides[i];
    if (has_sinks) {
        (slot++)->i64 = call->sinks_are_f32 ? any : call->sinks;
        (slot++)->i64 = call->sinks_are_f32 ? call->sinks : any;
        (slot++)->i64 = call->sinks_are_f32;
    }
    for (i = 0; i < KERNELS && code == 0; i++)
        if (route->kernels[i] != NULL)
            code = launch_slots(route->kernels[i], route->grids[i], (void *)(uintptr_t)route->stream, slots);
    return code;
}

static PyObject *call_attention(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    routes_t *kept = PyCapsule_GetPointer(self, ROUTES);
    route_t route;
    call_t call;
    PyObject *out;
    int found;

    if (kept == NULL)
        return NULL;
    if (nargs != CALL_ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "call: %zd arguments; %d needed", nargs, (int)CALL_ARGUMENTS);
    if (!read_call(&kept->reader, args, &call)) {
        PyErr_Clear();
        return nothing();
    }
    found = PyObject_IsTrue(args[PLAIN]) == 1 ? find_route(kept, &call, &route) : 0;
    if (found < 0)
        return NULL;
    if (!found)
        return read_for_python(&call);
    out = args[OUT];
    if (out == Py_None)
        out = make_out(kept, args[Q], &call);
    else
        Py_IncRef(out);
    if (out != NULL && launch_route(&route, &call, kept->reader.sinks != 0) != 0) {
        Py_DecRef(out);
        out = NULL;
    }
    let_go(&route);
    return out;
}

static PyObject *keep(PyObject *self, PyObject *args) {
    routes_t *kept = PyCapsule_GetPointer(self, ROUTES);
    route_t route;
    PyObject *given[KERNELS];
    Py_ssize_t slots;
    int i;

    if (kept == NULL ||
        !PyArg_ParseTuple(args, "LKp((LL)(LL)(LL)(LL)(LL))(KKKKK)OIOI", &route.device, &route.stream, &route.aligned, &route.low[0],
                          &route.high[0], &route.low[1], &route.high[1], &route.low[2], &route.high[2], &route.low[3],
                          &route.high[3], &route.low[4], &route.high[4], &route.scratch[0], &route.scratch[1], &route.scratch[2],
                          &route.scratch[3], &route.scratch[4], &given[DECODE], &route.grids[DECODE], &given[PREFILL],
                          &route.grids[PREFILL]))
        return NULL;
    if (kept->count == MAX_ROUTES)
        return nothing();
    slots = kept->reader.sinks ? SLOTS + SINK_SLOTS : SLOTS;
    for (i = 0; i < KERNELS; i++) {
        route.kernels[i] = kernel_of(given[i]);
        route.owners[i] = route.kernels[i] == NULL ? NULL : given[i];
        if (given[i] != Py_None && (route.kernels[i] == NULL || argument_count(route.kernels[i]) != slots))
            return nothing();
    }
    hold(&route);
    kept->routes[kept->count++] = route;
    return nothing();
}

static void forget_routes(routes_t *kept) {
    while (kept->count > 0) {
        route_t route = kept->routes[--kept->count];
        kept->last = 0;
        let_go(&route);
    }
}

static PyObject *forget(PyObject *self, PyObject *none) {
    routes_t *kept = PyCapsule_GetPointer(self, ROUTES);
    (void)none;
    if (kept == NULL)
        return NULL;
    forget_routes(kept);
    return nothing();
}

static void routes_free(PyObject *capsule) {
    routes_t *kept = PyCapsule_GetPointer(capsule, ROUTES);
    if (kept == NULL)
        return;
    forget_routes(kept);
    Py_DecRef(kept->reader.is_grad_enabled);
    Py_DecRef(kept->reader.requires_grad);
    Py_DecRef(kept->current_stream);
    Py_DecRef(kept->new_empty);
    PyMem_Free(kept);
}

static PyMethodDef route_methods[] = {
    {"call", (PyCFunction)(void (*)(void))call_attention, METH_FASTCALL,
     "call(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, sinks, max_seqlen_q, max_seqlen_k, plain) -> the\n"
     "output, where the call is `plain` (no lse, no feature but sinks, no workspace of the caller's), a route is kept for it,\n"
     "and it is launched; else what was read: ((device, aligned, max_pages, pages), (query_len, seqs, tokens, keys, least_query_len),\n"
     "addresses in the order of the tensors, that of an `out` of None 0, strides in the order of a launch); None\n"
     "where an argument is not as the call needs it."},
    {"keep", keep, METH_VARARGS,
     "keep(device, stream, aligned, box, scratch, decode, decode_grid, prefill, prefill_grid): launch such calls\n"
     "from now on. `box` is a table row's, `scratch` a workspace's addresses; kernels are bind's or None, without\n"
     "arguments of features but sinks, else nothing is kept."},
    {"forget", forget, METH_NOARGS, "forget(): keep no route any longer."},
};

static const char reader_text[] =
    "reader(exchange, current_stream, is_grad_enabled, device_type, code, bits, query_heads, kv_heads, qk_dim, v_dim,\n"
    "page_size, hnd, stride_mask, sinks, max_tokens, max_seqs) -> (call, keep, forget), which have docstrings. `exchange` is\n"
    "torch.Tensor.__dlpack_c_exchange_api__; device type, code and bits of the data's dtype are DLPack's; the rest says\n"
    "what calls are like.";

static PyObject *reader(PyObject *module, PyObject *args) {
    reader_t made;
    routes_t *kept;
    PyObject *exchange, *current_stream, *capsule, *result;
    const dl_exchange *table;
    Py_ssize_t i;

    (void)module;
    if (!PyArg_ParseTuple(args, "OOOLLLLLLLLLLLLL", &exchange, &current_stream, &made.is_grad_enabled, &made.device_type,
                          &made.code, &made.bits, &made.query_heads, &made.kv_heads, &made.qk_dim, &made.v_dim,
                          &made.page_size, &made.hnd, &made.stride_mask, &made.sinks, &made.max_tokens, &made.max_seqs))
        return NULL;
    table = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
    if (table == NULL)
        return NULL;
    if (table->major != 1 || table->read == NULL)
        return PyErr_Format(PyExc_ValueError, "reader: DLPack %d without borrowed tensors; 1 with them needed", (int)table->major);
    made.read = table->read;
    kept = PyMem_Calloc(1, sizeof *kept);
    if (kept == NULL)
        return PyErr_NoMemory();
    capsule = PyCapsule_New(kept, ROUTES, routes_free);
    if (capsule == NULL) {
        PyMem_Free(kept);
        return NULL;
    }
    kept->reader = made;
    kept->current_stream = current_stream;
    Py_IncRef(current_stream);
    Py_IncRef(made.is_grad_enabled);
    kept->reader.requires_grad = PyUnicode_InternFromString("requires_grad");
    kept->new_empty = PyUnicode_InternFromString("new_empty");
    result = kept->reader.requires_grad && kept->new_empty ? PyTuple_New(3) : NULL;
    for (i = 0; result != NULL && i < 3; i++) {
        PyObject *method = PyCFunction_NewEx(&route_methods[i], capsule, NULL);
        if (method == NULL || PyTuple_SetItem(result, i, method) != 0) {
            Py_DecRef(result);
            result = NULL;
        }
    }
    Py_DecRef(capsule);
    return result;
}
#endif
