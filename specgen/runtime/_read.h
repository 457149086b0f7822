/* Reads and checks the tensors of an attention call for _launch.c, through DLPack's C exchange API (1.x), which torch 2.10
   and later have: a table of functions, so that neither torch's headers nor its libraries are needed. What is not exactly as
   a call should be is left to checks.py, which finds out what is wrong and says so. */
#ifndef SPECGEN_READ_H
#define SPECGEN_READ_H
#include <Python.h>
#include <stdint.h>

typedef struct {
    int32_t type, id;
} dl_device;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} dl_dtype;

typedef struct {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape, *strides; /* in elements */
    uint64_t byte_offset;
} dl_tensor;

typedef int (*dl_read)(void *object, dl_tensor *tensor); /* borrows; -1 with an error set */

typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *from_object, *to_object;
    dl_read read;
    void *current_stream;
} dl_exchange;

enum argument { Q, K_CACHE, V_CACHE, BLOCK_TABLE, SEQ_LENS, CU_SEQLENS_Q, OUT, TENSORS };
enum other_argument { SINKS = TENSORS, MAX_SEQLEN_Q, MAX_SEQLEN_K, READ_ARGUMENTS };
enum bound { QUERY_LEN, SEQS, TOKENS, KEYS, LEAST_QUERY_LEN, BOUNDS }; /* table.Bounds */
enum { DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4, STRIDES = 11 };

/* What a call of one layer and its head counts is like; sizes as in geometry.py. */
typedef struct {
    dl_read read;
    PyObject *is_grad_enabled, *requires_grad; /* torch's function, the name */
    long long device_type;                     /* DLDeviceType */
    long long code, bits;                      /* of data: DLDataType */
    long long query_heads, kv_heads, qk_dim, v_dim, page_size, hnd, stride_mask, sinks, max_tokens, max_seqs;
} reader_t;

/* What was read of a call: addresses in the order of its tensors, 0 for no `out`; strides in that of a launch; the address
   of its sinks, if the layer has them. */
typedef struct {
    int64_t device, aligned, max_pages, pages, bounds[BOUNDS], addresses[TENSORS], strides[STRIDES], sinks, sinks_are_f32;
} call_t;

/* Whether tensor `i` has the rank, dtype, device and last stride of its kind, and memory. */
static int is_regular(const reader_t *reader, const dl_tensor *t, int i, int32_t device) {
    static const int ranks[TENSORS] = {3, 4, 4, 2, 1, 1, 3};
    int is_index = i == BLOCK_TABLE || i == SEQ_LENS || i == CU_SEQLENS_Q;
    return t->ndim == ranks[i] && t->dtype.code == (is_index ? DL_INT : reader->code) &&
           t->dtype.bits == (is_index ? 32 : reader->bits) && t->dtype.lanes == 1 &&
           t->device.type == reader->device_type && t->device.id == device && t->data != NULL && t->byte_offset == 0 &&
           t->strides != NULL && t->strides[t->ndim - 1] == 1;
}

static int have_heads(const reader_t *r, const dl_tensor *t) {
    return t[Q].shape[1] == r->query_heads && t[K_CACHE].shape[r->hnd ? 1 : 2] == r->kv_heads;
}

static int have_shapes(const reader_t *r, const dl_tensor *t, int has_out) {
    int slot = r->hnd ? 2 : 1, head = r->hnd ? 1 : 2;
    int64_t tokens = t[Q].shape[0], pages = t[K_CACHE].shape[0], seqs = t[BLOCK_TABLE].shape[0];
    const dl_tensor *out = &t[OUT];
    if (tokens < 1 || tokens > r->max_tokens || seqs < 1 || seqs > r->max_seqs || t[Q].shape[2] != r->qk_dim)
        return 0;
    if (t[K_CACHE].shape[slot] != r->page_size || t[K_CACHE].shape[3] != r->qk_dim)
        return 0;
    if (t[V_CACHE].shape[0] != pages || t[V_CACHE].shape[slot] != r->page_size ||
        t[V_CACHE].shape[head] != r->kv_heads || t[V_CACHE].shape[3] != r->v_dim)
        return 0;
    if (t[SEQ_LENS].shape[0] != seqs || t[CU_SEQLENS_Q].shape[0] != seqs + 1 || t[BLOCK_TABLE].shape[1] > INT32_MAX ||
        pages > INT32_MAX)
        return 0;
    return !has_out || (out->shape[0] == tokens && out->shape[1] == r->query_heads && out->shape[2] == r->v_dim &&
                        out->strides[1] >= r->v_dim && out->strides[0] >= r->query_heads * out->strides[1]);
}

/* Bytes from the first to the last element; sizes are at least 1. */
static int64_t extent(const dl_tensor *t) {
    int64_t elements = 1;
    int i;
    for (i = 0; i < t->ndim; i++)
        elements += (t->shape[i] - 1) * t->strides[i];
    return elements * (t->dtype.bits / 8);
}

static int is_in_place(const dl_tensor *out, const dl_tensor *q) {
    return out->data == q->data && out->shape[2] == q->shape[2] && out->strides[0] == q->strides[0] &&
           out->strides[1] == q->strides[1];
}

/* Whether the range of bytes of `out` crosses that of a tensor that is read, but for q itself; memory.py finds out what is shared. */
static int out_crosses(const dl_tensor *t) {
    const char *start = t[OUT].data, *stop = start + extent(&t[OUT]);
    int i;
    for (i = is_in_place(&t[OUT], &t[Q]) ? K_CACHE : Q; i <= V_CACHE; i++) {
        const char *other = t[i].data;
        if (start < other + extent(&t[i]) && other < stop)
            return 1;
    }
    return 0;
}

/* odd_cache of checks.py; strides of page, slot and head. */
static int is_odd(const reader_t *r, const int64_t *strides) {
    int64_t page = strides[0], slot = strides[1], head = strides[2];
    return slot == 0 || page % slot != 0 || (r->kv_heads > 1 && head >= ((1LL << 31) + r->kv_heads - 2) / (r->kv_heads - 1));
}

/* A bound that the caller gave; `none` for None. 0, or -1 where it is no int of at least 0. */
static int read_bound(PyObject *given, int64_t none, int64_t *bound) {
    *bound = none;
    if (given == Py_None)
        return 0;
    if (!PyLong_CheckExact(given))
        return -1;
    *bound = PyLong_AsLongLong(given);
    return *bound < 0 ? -1 : 0; /* one beyond 64 bits included, with an error pending */
}

/* The sinks of a layer that has them, none of another: 1, or 0, maybe with an error pending. */
static int read_sinks(const reader_t *r, PyObject *sinks, int32_t device, call_t *call) {
    dl_tensor t;
    if (!r->sinks || sinks == Py_None)
        return !r->sinks && sinks == Py_None;
    if (r->read(sinks, &t) != 0 || t.ndim != 1 || t.shape[0] != r->query_heads || t.strides == NULL || t.strides[0] != 1 ||
        t.dtype.lanes != 1 || t.device.type != r->device_type || t.device.id != device || t.byte_offset != 0)
        return 0;
    call->sinks = (int64_t)(intptr_t)t.data;
    call->sinks_are_f32 = t.dtype.code == DL_FLOAT && t.dtype.bits == 32;
    return call->sinks_are_f32 || (t.dtype.code == DL_BFLOAT && t.dtype.bits == 16);
}

/* Whether autograd would follow the call; -1 with an error pending. */
static int needs_grad(const reader_t *r, PyObject *const *args) {
    static const int data[] = {Q, K_CACHE, V_CACHE, OUT, SINKS};
    const int count = sizeof data / sizeof *data;
    PyObject *value = PyObject_CallNoArgs(r->is_grad_enabled);
    int i, found = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_DecRef(value);
    if (found != 1)
        return found;
    for (i = 0, found = 0; i < count && found == 0; i++) {
        if (args[data[i]] == Py_None)
            continue;
        value = PyObject_GetAttr(args[data[i]], r->requires_grad);
        found = value == NULL ? -1 : PyObject_IsTrue(value);
        Py_DecRef(value);
    }
    return found;
}

/* Reads the tensors, then the bounds, of `args`: 1, or 0, maybe with an error pending, where one is not as it should be. */
static int read_call(const reader_t *r, PyObject *const *args, call_t *call) {
    dl_tensor t[TENSORS];
    int64_t bits = 0, keys;
    int slot = r->hnd ? 2 : 1, head = r->hnd ? 1 : 2, has_out = args[OUT] != Py_None, i;

    call->addresses[OUT] = 0;
    for (i = 0; i < OUT + has_out; i++) {
        if (r->read(args[i], &t[i]) != 0 || !is_regular(r, &t[i], i, t[Q].device.id) || (i == K_CACHE && !have_heads(r, t)))
            return 0;
        call->addresses[i] = (int64_t)(intptr_t)t[i].data;
    }
    if (!have_shapes(r, t, has_out) || (has_out && out_crosses(t)) || !read_sinks(r, args[SINKS], t[Q].device.id, call) ||
        needs_grad(r, args) != 0)
        return 0;

    call->strides[0] = t[BLOCK_TABLE].strides[0];
    call->strides[1] = t[Q].strides[0];
    call->strides[2] = t[Q].strides[1];
    for (i = 0; i < 2; i++) {
        const int64_t *of_cache = t[K_CACHE + i].strides;
        call->strides[3 + 3 * i] = of_cache[0];
        call->strides[4 + 3 * i] = of_cache[slot];
        call->strides[5 + 3 * i] = of_cache[head];
    }
    call->strides[9] = has_out ? t[OUT].strides[0] : r->query_heads * r->v_dim;
    call->strides[10] = has_out ? t[OUT].strides[1] : r->v_dim;
    for (i = 1; i < STRIDES; i++)
        bits |= call->strides[i];
    call->aligned = !((call->addresses[Q] | call->addresses[K_CACHE] | call->addresses[V_CACHE] | call->addresses[OUT]) & 15 ||
                      bits & r->stride_mask || is_odd(r, call->strides + 3) || is_odd(r, call->strides + 6));
    call->device = t[Q].device.id;
    call->max_pages = t[BLOCK_TABLE].shape[1];
    call->pages = t[K_CACHE].shape[0];

    call->bounds[SEQS] = t[BLOCK_TABLE].shape[0];
    call->bounds[TOKENS] = t[Q].shape[0];
    keys = call->max_pages * r->page_size;
    if (read_bound(args[MAX_SEQLEN_Q], call->bounds[TOKENS], &call->bounds[QUERY_LEN]) != 0 ||
        read_bound(args[MAX_SEQLEN_K], keys, &call->bounds[KEYS]) != 0)
        return 0;
    if (call->bounds[QUERY_LEN] > call->bounds[TOKENS])
        call->bounds[QUERY_LEN] = call->bounds[TOKENS];
    call->bounds[LEAST_QUERY_LEN] = call->bounds[TOKENS] - (call->bounds[SEQS] - 1) * call->bounds[QUERY_LEN];
    if (call->bounds[LEAST_QUERY_LEN] < 1)
        call->bounds[LEAST_QUERY_LEN] = 1;
    if (call->bounds[KEYS] > keys)
        call->bounds[KEYS] = keys;
    if (call->bounds[KEYS] < 1)
        call->bounds[KEYS] = 1;
    return 1;
}
#endif
