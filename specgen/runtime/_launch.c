/* Launches a loaded kernel through the CUDA or HIP driver: `bind` packs what never changes (function, block,
   shared memory, argument kinds) once and returns a builtin function, called as kernel(grid, stream, *args).
   Parameters are arguments, zeros, or tensor maps, which the CUDA driver encodes from arguments; maps are
   kept by what they are made of, so that a steady state encodes none. `reader` gives what reads, checks and launches a
   whole attention call (_read.h, _routes.h).

   Touches no driver library itself: driver.py opens it and passes the addresses of its functions, so that
   this file needs neither CUDA or HIP headers, nor torch, nor dlopen, and one build serves every CPython from
   3.11 on (limited API). Whichever of their headers it is built with, the binary is the same: no "#" formats,
   whose length type depends on the headers, no Py_INCREF and Py_DECREF, which newer headers expand otherwise.
   Build: cc -O2 -shared -fPIC -I<python include> _launch.c -o _launch.abi3.so */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_routes.h"
#include "_tensor_maps.h"

#define MAX_ARGUMENTS 96  /* of the call */
#define MAX_PARAMETERS 96 /* of the kernel */
#define MAX_MAPS 4
#define CAPSULE "_launch.Kernel"

/* cuLaunchKernel and hipModuleLaunchKernel have one signature; 0 is success for both vendors. */
typedef int (*launch_function)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                               void *stream, void **parameters, void **extra);
/* CUlaunchConfig, CUlaunchAttribute and cuLaunchKernelEx, of CUDA alone. */
typedef struct {
    int id; /* 6: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */
    char padding[4];
    union {
        int allowed;
        char whole[64];
    } value;
} launch_attribute_t;
typedef struct {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void *stream;
    launch_attribute_t *attributes;
    unsigned attribute_count;
} launch_config_t;
typedef int (*launch_with_function)(const launch_config_t *config, void *function, void **parameters, void **extra);
typedef int (*get_context_function)(void **context); /* cuCtxGetCurrent, cuCtxPopCurrent */
typedef int (*push_context_function)(void *context); /* cuCtxPushCurrent */
typedef int (*get_device_function)(int *device);     /* hipGetDevice */
typedef int (*set_device_function)(int device);      /* hipSetDevice */

enum stage { STAGE_LAUNCH, STAGE_ENTER, STAGE_LEAVE, STAGE_ENCODE }; /* STAGE_ENCODE + i: map i */

struct kernel {
    launch_function launch;
    get_context_function get_context, pop_context; /* CUDA; get_context is NULL for HIP */
    push_context_function push_context;
    get_device_function get_device; /* HIP */
    set_device_function set_device;
    void *context; /* CUDA: the device's primary context */
    int device;    /* HIP: the device's number */
    void *function;
    unsigned threads, shared_bytes;
    encode_function encode;
    launch_with_function launch_with; /* NULL: the launch waits for the one before it */
    uint64_t late;                    /* programs that find no multiprocessor at first */
    Py_ssize_t count, parameter_count, map_count;
    char kinds[MAX_ARGUMENTS];      /* 'p' pointer, 'i' int32, 'l' int64, '-' passed over: no parameter needs it */
    int parameters[MAX_PARAMETERS]; /* position of an argument, -1 a zero, -2 `late`, -3 - i: map i */
    map_maker_t *makers;            /* [map_count] */
    PyObject *data_ptr;             /* "data_ptr" */
    PyObject *refuse;               /* refuse(position, value) raises; -1 the stream, -2 the grid, -3 the count */
    PyObject *fail;                 /* fail(code, stage, grid, stream) raises */
};

/* Makes the kernel's own context or device current; *former is what leave() puts back, if *switched. */
static int enter(const kernel_t *kernel, int *switched, int *former) {
    int code;
    *switched = *former = 0;
    if (kernel->get_context != NULL) {
        void *current = NULL;
        if ((code = kernel->get_context(&current)) != 0)
            return code;
        if (current == kernel->context)
            return 0;
        code = kernel->push_context(kernel->context);
    } else {
        if ((code = kernel->get_device(former)) != 0)
            return code;
        if (*former == kernel->device)
            return 0;
        code = kernel->set_device(kernel->device);
    }
    *switched = code == 0;
    return code;
}

static int leave(const kernel_t *kernel, int former) {
    void *current;
    return kernel->get_context != NULL ? kernel->pop_context(&current) : kernel->set_device(former);
}

/* Replaces a pending conversion error by the caller's own; always returns NULL. */
static PyObject *refuse(const kernel_t *kernel, Py_ssize_t position, PyObject *value) {
    PyObject *result;
    PyErr_Clear();
    result = PyObject_CallFunction(kernel->refuse, "nO", position, value);
    if (result != NULL) {
        Py_DecRef(result);
        PyErr_SetString(PyExc_SystemError, "_launch: refuse() returned");
    }
    return NULL;
}

static PyObject *refuse_count(const kernel_t *kernel, Py_ssize_t count) {
    PyObject *value = PyLong_FromSsize_t(count);
    if (value != NULL) {
        refuse(kernel, -3, value);
        Py_DecRef(value);
    }
    return NULL;
}

/* Reads an address, an int or value.data_ptr(). 0, or -1 with an error set; *ours: the value is unfit. */
static int read_pointer(const kernel_t *kernel, PyObject *value, void **pointer, int *ours) {
    unsigned long long address;
    *ours = 1;
    if (PyLong_Check(value)) {
        address = PyLong_AsUnsignedLongLong(value);
        if (address == (unsigned long long)-1 && PyErr_Occurred())
            return -1;
    } else {
        PyObject *number = PyObject_CallMethodObjArgs(value, kernel->data_ptr, NULL);
        if (number == NULL) {
            *ours = PyErr_ExceptionMatches(PyExc_AttributeError);
            return -1;
        }
        address = PyLong_AsUnsignedLongLong(number);
        Py_DecRef(number);
        if (address == (unsigned long long)-1 && PyErr_Occurred())
            return -1;
    }
    *pointer = (void *)(uintptr_t)address;
    return 0;
}

/* Queues the kernel; the driver's error code. */
static int start(const kernel_t *kernel, unsigned grid, void *stream, void **parameters) {
    if (kernel->launch_with != NULL) {
        launch_attribute_t overlap = {.id = 6, .value.allowed = 1};
        launch_config_t config = {grid, 1, 1, kernel->threads, 1, 1, kernel->shared_bytes, stream, &overlap, 1};
        return kernel->launch_with(&config, kernel->function, parameters, NULL);
    }
    return kernel->launch(kernel->function, grid, 1, 1, kernel->threads, 1, 1, kernel->shared_bytes, stream,
                          parameters, NULL);
}

/* Launches the kernel on its own device with one slot per argument. 0, or -1 with an error set. */
static int launch_slots(const kernel_t *kernel, unsigned grid, void *stream, const slot_t *slots) {
    map_t maps[MAX_MAPS];
    void *parameters[MAX_PARAMETERS];
    uint64_t zero = 0;
    Py_ssize_t i;
    int code, stage, switched, former;
    PyObject *result;

    for (i = 0; i < kernel->parameter_count; i++) {
        int from = kernel->parameters[i];
        parameters[i] = from >= 0    ? (void *)&slots[from]
                        : from == -1 ? (void *)&zero
                        : from == -2 ? (void *)&kernel->late
                                     : (void *)&maps[-3 - from];
    }

    stage = STAGE_ENTER;
    if ((code = enter(kernel, &switched, &former)) == 0) {
        for (i = 0; i < kernel->map_count && code == 0; i++) {
            stage = STAGE_ENCODE + (int)i;
            code = make_map(kernel->encode, &kernel->makers[i], slots, &maps[i]);
        }
        if (code == 0) {
            stage = STAGE_LAUNCH;
            Py_BEGIN_ALLOW_THREADS; /* a full queue blocks the launch */
            code = start(kernel, grid, stream, parameters);
            Py_END_ALLOW_THREADS;
        }
        if (switched) {
            int left = leave(kernel, former);
            if (code == 0 && left != 0) {
                stage = STAGE_LEAVE;
                code = left;
            }
        }
    }
    if (code == 0)
        return 0;
    result = PyObject_CallFunction(kernel->fail, "iiIK", code, stage, grid, (unsigned long long)(uintptr_t)stream);
    if (result != NULL) {
        Py_DecRef(result);
        PyErr_SetString(PyExc_SystemError, "_launch: fail() returned");
    }
    return -1;
}

static PyObject *kernel_call(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    const kernel_t *kernel = PyCapsule_GetPointer(self, CAPSULE);
    slot_t slots[MAX_ARGUMENTS];
    void *stream;
    long long number;
    Py_ssize_t i;
    unsigned grid;
    int ours;

    if (kernel == NULL)
        return NULL;
    if (nargs != kernel->count + 2)
        return refuse_count(kernel, nargs);
    if (!PyLong_Check(args[0]))
        return refuse(kernel, -2, args[0]);
    number = PyLong_AsLongLong(args[0]);
    if (number < 1 || number > INT32_MAX) /* -1 with an error pending included */
        return refuse(kernel, -2, args[0]);
    grid = (unsigned)number;
    if (!PyLong_Check(args[1]) || read_pointer(kernel, args[1], &stream, &ours) != 0)
        return refuse(kernel, -1, args[1]);

    args += 2;
    for (i = 0; i < kernel->count; i++) {
        PyObject *value = args[i];
        if (kernel->kinds[i] == '-')
            continue;
        if (kernel->kinds[i] == 'p') {
            if (read_pointer(kernel, value, &slots[i].pointer, &ours) != 0)
                return ours ? refuse(kernel, i, value) : NULL;
            continue;
        }
        if (!PyLong_Check(value))
            return refuse(kernel, i, value);
        number = PyLong_AsLongLong(value);
        if (number == -1 && PyErr_Occurred())
            return refuse(kernel, i, value);
        if (kernel->kinds[i] == 'l') {
            slots[i].i64 = number;
        } else {
            if (number < INT32_MIN || number > INT32_MAX)
                return refuse(kernel, i, value);
            slots[i].i64 = number;
        }
    }
    if (launch_slots(kernel, grid, stream, slots) != 0)
        return NULL;
    Py_IncRef(Py_None);
    return Py_None;
}

static void kernel_free(PyObject *capsule) {
    kernel_t *kernel = PyCapsule_GetPointer(capsule, CAPSULE);
    if (kernel == NULL)
        return;
    Py_DecRef(kernel->data_ptr);
    Py_DecRef(kernel->refuse);
    Py_DecRef(kernel->fail);
    PyMem_Free(kernel->makers);
    PyMem_Free(kernel);
}

/* The kernel of a callable that bind returned, or NULL. */
static kernel_t *kernel_of(PyObject *callable) {
    PyObject *self = PyObject_TypeCheck(callable, &PyCFunction_Type) ? PyCFunction_GetSelf(callable) : NULL;
    return self != NULL && PyCapsule_IsValid(self, CAPSULE) ? PyCapsule_GetPointer(self, CAPSULE) : NULL;
}

static Py_ssize_t argument_count(const kernel_t *kernel) { return kernel->count; }

static PyMethodDef kernel_method = {
    "kernel", (PyCFunction)(void (*)(void))kernel_call, METH_FASTCALL,
    "kernel(grid, stream, *args): launch `grid` blocks on the stream of handle `stream`."};

static void *address(unsigned long long number) { return (void *)(uintptr_t)number; }

/* Reads bind's description of parameters and maps. 0, or -1 with an error set. */
static int read_parameters(kernel_t *kernel, PyObject *parameters, PyObject *maps) {
    long long numbers[MAX_PARAMETERS];
    Py_ssize_t i;
    kernel->map_count = PyTuple_Size(maps);
    if (kernel->map_count < 0 || kernel->map_count > MAX_MAPS || (kernel->map_count && kernel->encode == NULL)) {
        PyErr_SetString(PyExc_ValueError, "bind: more maps than possible, or no function to encode them");
        return -1;
    }
    kernel->parameter_count =
        read_ints(parameters, numbers, MAX_PARAMETERS, -2 - kernel->map_count, kernel->count - 1);
    if (kernel->parameter_count < 0)
        return -1;
    for (i = 0; i < kernel->parameter_count; i++)
        kernel->parameters[i] = (int)numbers[i];
    if (kernel->map_count == 0)
        return 0;
    kernel->makers = PyMem_Calloc((size_t)kernel->map_count, sizeof *kernel->makers);
    if (kernel->makers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (i = 0; i < kernel->map_count; i++)
        if (read_maker(PyTuple_GetItem(maps, i), kernel->count, &kernel->makers[i]) != 0)
            return -1;
    return 0;
}

static PyObject *bind(PyObject *module, PyObject *args) {
    const char *vendor, *kinds;
    unsigned long long launch, get, enter, leave, encode, launch_with, scope, function;
    unsigned threads, shared_bytes;
    int late;
    Py_ssize_t count, i;
    PyObject *parameters, *maps, *on_refuse, *on_fail, *capsule, *result;
    kernel_t *kernel;
    int cuda;

    (void)module;
    if (!PyArg_ParseTuple(args, "sKKKKKKKKIIsOOiOO", &vendor, &launch, &get, &enter, &leave, &encode, &launch_with, &scope,
                          &function, &threads, &shared_bytes, &kinds, &parameters, &maps, &late, &on_refuse, &on_fail))
        return NULL;
    count = (Py_ssize_t)strlen(kinds);
    if (count > MAX_ARGUMENTS)
        return PyErr_Format(PyExc_ValueError, "bind: %zd arguments; at most %d", count, MAX_ARGUMENTS);
    for (i = 0; i < count; i++)
        if (strchr("pil-", kinds[i]) == NULL)
            return PyErr_Format(PyExc_ValueError, "bind: argument %zd has kind %d; 'p', 'i', 'l' or '-' needed", i,
                                (int)kinds[i]);
    cuda = strcmp(vendor, "nvidia") == 0;
    if (!cuda && strcmp(vendor, "amd") != 0)
        return PyErr_Format(PyExc_ValueError, "bind: vendor '%s'; 'nvidia' or 'amd' needed", vendor);
    if (!launch || !get || !enter || (cuda && !leave) || !function)
        return PyErr_Format(PyExc_ValueError, "bind: a null address");

    kernel = PyMem_Calloc(1, sizeof *kernel);
    if (kernel == NULL)
        return PyErr_NoMemory();
    kernel->launch = (launch_function)address(launch);
    kernel->encode = (encode_function)address(encode);
    if (late >= 0) {
        kernel->launch_with = (launch_with_function)address(launch_with);
        kernel->late = (uint64_t)late;
    }
    if (cuda) {
        kernel->get_context = (get_context_function)address(get);
        kernel->push_context = (push_context_function)address(enter);
        kernel->pop_context = (get_context_function)address(leave);
        kernel->context = address(scope);
    } else {
        kernel->get_device = (get_device_function)address(get);
        kernel->set_device = (set_device_function)address(enter);
        kernel->device = (int)scope;
    }
    kernel->function = address(function);
    kernel->threads = threads;
    kernel->shared_bytes = shared_bytes;
    kernel->count = count;
    for (i = 0; i < count; i++)
        kernel->kinds[i] = kinds[i];
    kernel->data_ptr = PyUnicode_InternFromString("data_ptr");
    Py_IncRef(on_refuse);
    kernel->refuse = on_refuse;
    Py_IncRef(on_fail);
    kernel->fail = on_fail;

    capsule = NULL;
    if (kernel->data_ptr != NULL && read_parameters(kernel, parameters, maps) == 0)
        capsule = PyCapsule_New(kernel, CAPSULE, kernel_free);
    if (capsule == NULL) {
        Py_DecRef(kernel->data_ptr);
        Py_DecRef(on_refuse);
        Py_DecRef(on_fail);
        PyMem_Free(kernel->makers);
        PyMem_Free(kernel);
        return NULL;
    }
    result = PyCFunction_NewEx(&kernel_method, capsule, NULL);
    Py_DecRef(capsule);
    return result;
}

static PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS,
     "bind(vendor, launch, get, enter, leave, encode, launch_with, scope, function, threads, shared_bytes, kinds,\n"
     "parameters, maps, late, refuse, fail) -> kernel. `vendor` is \"nvidia\" or \"amd\"; addresses and handles are ints; `kinds`\n"
     "has one of 'p', 'i', 'l' per argument, '-' for one that no parameter needs; `parameters` and `maps` are\n"
     "tuples as tensor_maps.resolve gives them; `late` is launcher.Launch's, -1 for none."},
    {"reader", reader, METH_VARARGS, reader_text},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef_Slot slots_of_module[] = {{0, NULL}};

static struct PyModuleDef definition = {
    .m_base = {.ob_base.ob_refcnt = 1}, /* PyModuleDef_HEAD_INIT of 3.11; that of 3.12 has another count */
    .m_name = "_launch",
    .m_doc = "Launches kernels through driver functions given by address.",
    .m_methods = methods,
    .m_slots = slots_of_module};

PyMODINIT_FUNC PyInit__launch(void) { return PyModuleDef_Init(&definition); }
