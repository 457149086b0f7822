/* Reads and checks the tensors of an attention call for _launch.c, in one C call, through DLPack's C exchange API (1.x),
   which torch 2.10 and later have: a table of functions, so that neither torch's headers nor its libraries are needed. What
   is not exactly as a call should be is left to checks.py, which finds out what is wrong and says so. */
#ifndef SPECGEN_READ_H
#define SPECGEN_READ_H
#include <Python.h>
#include <stdint.h>

#define READER "_launch.Reader"

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

enum tensor { Q, K_CACHE, V_CACHE, BLOCK_TABLE, SEQ_LENS, CU_SEQLENS_Q, OUT, TENSORS };
enum { DL_INT = 0 };

/* What a call of one layer and its head counts is like; sizes as in geometry.py. */
typedef struct {
    dl_read read;
    long long device_type; /* DLDeviceType */
    long long code, bits;  /* of data: DLDataType */
    long long query_heads, kv_heads, qk_dim, v_dim, page_size, hnd, stride_mask, max_tokens, max_seqs;
} reader_t;

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

static PyObject *nothing_read(void) {
    Py_IncRef(Py_None);
    return Py_None;
}

/* Whether tensor `i` has the rank, dtype, device and last stride of its kind, and memory. */
static int is_regular(const reader_t *reader, const dl_tensor *t, int i, int32_t device) {
    static const int ranks[TENSORS] = {3, 4, 4, 2, 1, 1, 3};
    int is_index = i == BLOCK_TABLE || i == SEQ_LENS || i == CU_SEQLENS_Q;
    return t->ndim == ranks[i] && t->dtype.code == (is_index ? DL_INT : reader->code) &&
           t->dtype.bits == (is_index ? 32 : reader->bits) && t->dtype.lanes == 1 &&
           t->device.type == reader->device_type && t->device.id == device && t->data != NULL && t->byte_offset == 0 &&
           t->strides != NULL && t->strides[t->ndim - 1] == 1;
}

static int have_shapes(const reader_t *r, const dl_tensor *t, int has_out) {
    int slot = r->hnd ? 2 : 1, head = r->hnd ? 1 : 2;
    int64_t tokens = t[Q].shape[0], pages = t[K_CACHE].shape[0], seqs = t[BLOCK_TABLE].shape[0];
    const dl_tensor *out = &t[OUT];
    if (tokens < 1 || tokens > r->max_tokens || seqs < 1 || seqs > r->max_seqs)
        return 0;
    if (t[Q].shape[1] != r->query_heads || t[Q].shape[2] != r->qk_dim)
        return 0;
    if (t[K_CACHE].shape[slot] != r->page_size || t[K_CACHE].shape[head] != r->kv_heads || t[K_CACHE].shape[3] != r->qk_dim)
        return 0;
    if (t[V_CACHE].shape[0] != pages || t[V_CACHE].shape[slot] != r->page_size ||
        t[V_CACHE].shape[head] != r->kv_heads || t[V_CACHE].shape[3] != r->v_dim)
        return 0;
    if (t[SEQ_LENS].shape[0] != seqs || t[CU_SEQLENS_Q].shape[0] != seqs + 1)
        return 0;
    return !has_out || (out->shape[0] == tokens && out->shape[1] == r->query_heads && out->shape[2] == r->v_dim &&
                        out->strides[1] >= r->v_dim && out->strides[0] >= r->query_heads * out->strides[1]);
}

/* odd_cache of checks.py. */
static int is_odd(const reader_t *r, int64_t page, int64_t slot, int64_t head) {
    return slot == 0 || page % slot != 0 || (r->kv_heads > 1 && head >= ((1LL << 31) + r->kv_heads - 2) / (r->kv_heads - 1));
}

/* read(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out or None); see the method's docstring. */
static PyObject *read_call(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    const reader_t *r = PyCapsule_GetPointer(self, READER);
    dl_tensor t[TENSORS];
    int64_t numbers[6], addresses[TENSORS] = {0}, strides[11], bits = 0;
    int slot, head, has_out, count, i;
    PyObject *found, *parts[2];

    if (r == NULL)
        return NULL;
    if (nargs != TENSORS)
        return PyErr_Format(PyExc_TypeError, "read: %zd arguments; %d needed", nargs, (int)TENSORS);
    has_out = args[OUT] != Py_None;
    count = has_out ? TENSORS : OUT;
    for (i = 0; i < count; i++) {
        if (r->read(args[i], &t[i]) != 0) {
            PyErr_Clear();
            return nothing_read();
        }
        if (!is_regular(r, &t[i], i, t[Q].device.id))
            return nothing_read();
        addresses[i] = (int64_t)(intptr_t)t[i].data;
    }
    if (!have_shapes(r, t, has_out))
        return nothing_read();

    slot = r->hnd ? 2 : 1;
    head = r->hnd ? 1 : 2;
    strides[0] = t[BLOCK_TABLE].strides[0];
    strides[1] = t[Q].strides[0];
    strides[2] = t[Q].strides[1];
    for (i = 0; i < 2; i++) {
        const int64_t *of_cache = t[K_CACHE + i].strides;
        strides[3 + 3 * i] = of_cache[0];
        strides[4 + 3 * i] = of_cache[slot];
        strides[5 + 3 * i] = of_cache[head];
    }
    strides[9] = has_out ? t[OUT].strides[0] : r->query_heads * r->v_dim;
    strides[10] = has_out ? t[OUT].strides[1] : r->v_dim;
    for (i = 1; i < 11; i++)
        bits |= strides[i];
    numbers[0] = t[Q].device.id;
    numbers[1] = !((addresses[Q] | addresses[K_CACHE] | addresses[V_CACHE] | addresses[OUT]) & 15 || bits & r->stride_mask ||
                   is_odd(r, strides[3], strides[4], strides[5]) || is_odd(r, strides[6], strides[7], strides[8]));
    numbers[2] = t[Q].shape[0];
    numbers[3] = t[BLOCK_TABLE].shape[0];
    numbers[4] = t[BLOCK_TABLE].shape[1];
    numbers[5] = t[K_CACHE].shape[0];
    found = ints(numbers, 6);
    parts[0] = ints(addresses, TENSORS);
    parts[1] = ints(strides, 11);
    if (found != NULL && parts[0] != NULL && parts[1] != NULL) {
        PyObject *whole = PyTuple_Pack(3, found, parts[0], parts[1]);
        Py_DecRef(found);
        Py_DecRef(parts[0]);
        Py_DecRef(parts[1]);
        return whole;
    }
    Py_DecRef(found);
    Py_DecRef(parts[0]);
    Py_DecRef(parts[1]);
    return NULL;
}

static void reader_free(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, READER)); }

static PyMethodDef read_method = {
    "read", (PyCFunction)(void (*)(void))read_call, METH_FASTCALL,
    "read(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out) -> ((device, aligned, tokens, seqs,\n"
    "max_pages, pages), addresses, strides), or None where a tensor is not as the call needs it. Addresses in the\n"
    "order of the arguments, that of an `out` of None 0; strides in the order of a launch."};

static PyObject *reader(PyObject *module, PyObject *args) {
    reader_t made, *kept;
    PyObject *exchange, *capsule, *result;
    const dl_exchange *table;

    (void)module;
    if (!PyArg_ParseTuple(args, "OLLLLLLLLLLLL", &exchange, &made.device_type, &made.code, &made.bits, &made.query_heads,
                          &made.kv_heads, &made.qk_dim, &made.v_dim, &made.page_size, &made.hnd, &made.stride_mask,
                          &made.max_tokens, &made.max_seqs))
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
    *kept = made;
    capsule = PyCapsule_New(kept, READER, reader_free);
    if (capsule == NULL) {
        PyMem_Free(kept);
        return NULL;
    }
    result = PyCFunction_NewEx(&read_method, capsule, NULL);
    Py_DecRef(capsule);
    return result;
}
#endif
