/* Tensor maps for _launch.c: what one is made of, the call that encodes it, and a cache of those encoded, by all that
   differs between two maps of one kernel argument. Calls the driver through an address alone. */
#ifndef SPECGEN_TENSOR_MAPS_H
#define SPECGEN_TENSOR_MAPS_H
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAX_RANK 5 /* of a tensor map, in the driver */
#define CACHE_SLOTS 256 /* maps kept per kernel and argument, a power of two: layers of a model, and more */
#define CACHE_PROBES 4

/* cuTensorMapEncodeTiled; `map` is aligned to 64 bytes. */
typedef int (*encode_function)(void *map, int data_type, unsigned rank, void *address, const uint64_t *extents,
                               const uint64_t *strides, const unsigned *box, const unsigned *steps,
                               int interleave, int swizzle, int promotion, int fill);

/* CU_TENSOR_MAP_INTERLEAVE_NONE, FLOAT_OOB_FILL_NONE: zeros beyond the extents. */
enum { INTERLEAVE_NONE = 0, FILL_ZEROS = 0 };

typedef struct {
    _Alignas(64) unsigned char bytes[128];
} map_t; /* CUtensorMap */

/* All that differs between two maps of one argument: address, extents, strides in bytes. */
typedef struct {
    uint64_t words[1 + MAX_RANK + MAX_RANK - 1];
} map_key_t;

/* What a map is made of: positions of arguments, and numbers. Dimension 0 has stride 1. */
typedef struct {
    unsigned rank, tensor, strides[MAX_RANK - 1], box[MAX_RANK];
    long long extents[MAX_RANK]; /* a size, or -1 - the position of the argument that holds it */
    int data_type, itemsize, swizzle, promotion;
    map_key_t keys[CACHE_SLOTS]; /* an address of 0: an empty slot */
    unsigned char maps[CACHE_SLOTS][sizeof(map_t)];
} map_maker_t;

typedef union {
    void *pointer;
    int64_t i64; /* an i32 too: the driver reads its low half, as both vendors' hosts are little-endian */
} slot_t;

/* The map of these arguments, from the cache or the driver; the driver's error code. */
static int make_map(encode_function encode, map_maker_t *maker, const slot_t *slots, map_t *map) {
    static const unsigned steps[MAX_RANK] = {1, 1, 1, 1, 1};
    map_key_t key;
    uint64_t *extents = key.words + 1, *strides = extents + MAX_RANK, hash = 0;
    unsigned i, slot, start;
    int code;

    memset(&key, 0, sizeof key);
    key.words[0] = (uint64_t)(uintptr_t)slots[maker->tensor].pointer;
    for (i = 0; i < maker->rank; i++)
        extents[i] = (uint64_t)(maker->extents[i] < 0 ? slots[-1 - maker->extents[i]].i64 : maker->extents[i]);
    for (i = 0; i + 1 < maker->rank; i++)
        strides[i] = (uint64_t)slots[maker->strides[i]].i64 * (uint64_t)maker->itemsize;

    for (i = 0; i < sizeof key.words / sizeof *key.words; i++)
        hash = (hash ^ key.words[i]) * 0x9E3779B97F4A7C15u; /* 2^64 / golden ratio */
    start = (unsigned)(hash >> 32) % CACHE_SLOTS;
    for (i = 0, slot = start; i < CACHE_PROBES; i++, slot = (slot + 1) % CACHE_SLOTS) {
        if (memcmp(&maker->keys[slot], &key, sizeof key) == 0) {
            memcpy(map, maker->maps[slot], sizeof *map);
            return 0;
        }
        if (maker->keys[slot].words[0] == 0)
            break;
    }
    code = encode(map, maker->data_type, maker->rank, slots[maker->tensor].pointer, extents, strides, maker->box,
                  steps, INTERLEAVE_NONE, maker->swizzle, maker->promotion, FILL_ZEROS);
    if (code == 0) {
        if (i == CACHE_PROBES)
            slot = start;
        maker->keys[slot] = key;
        memcpy(maker->maps[slot], map, sizeof *map);
    }
    return code;
}

/* The ints of a tuple, each from `low` to `high`: how many, or -1 with an error set. */
static Py_ssize_t read_ints(PyObject *tuple, long long *numbers, Py_ssize_t most, long long low, long long high) {
    Py_ssize_t i, count = PyTuple_Size(tuple);
    if (count > most) {
        PyErr_Format(PyExc_ValueError, "bind: %zd numbers; at most %zd", count, most);
        return -1;
    }
    for (i = 0; i < count; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (numbers[i] == -1 && PyErr_Occurred())
            return -1;
        if (numbers[i] < low || numbers[i] > high) {
            PyErr_Format(PyExc_ValueError, "bind: %lld, from %lld to %lld needed", numbers[i], low, high);
            return -1;
        }
    }
    return count;
}

/* One of the maps that bind is given. 0, or -1 with an error set. */
static int read_maker(PyObject *map, Py_ssize_t count, map_maker_t *maker) {
    PyObject *extents, *strides, *box;
    long long numbers[MAX_RANK];
    Py_ssize_t i, rank;
    if (!PyArg_ParseTuple(map, "IiiiiOOO", &maker->tensor, &maker->data_type, &maker->itemsize, &maker->swizzle,
                          &maker->promotion, &extents, &strides, &box))
        return -1;
    if ((rank = read_ints(extents, maker->extents, MAX_RANK, -count, INT64_MAX)) < 0)
        return -1;
    maker->rank = (unsigned)rank;
    if (rank < 1 || PyTuple_Size(strides) != rank - 1 || PyTuple_Size(box) != rank ||
        (Py_ssize_t)maker->tensor >= count) {
        PyErr_SetString(PyExc_ValueError, "bind: a map of one tensor needs a box of its rank and a stride less");
        return -1;
    }
    if (read_ints(strides, numbers, MAX_RANK, 0, count - 1) < 0)
        return -1;
    for (i = 0; i + 1 < rank; i++)
        maker->strides[i] = (unsigned)numbers[i];
    if (read_ints(box, numbers, MAX_RANK, 1, 256) < 0)
        return -1;
    for (i = 0; i < rank; i++)
        maker->box[i] = (unsigned)numbers[i];
    return 0;
}

#endif
