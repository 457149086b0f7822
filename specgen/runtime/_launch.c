/* Launches a loaded kernel through the CUDA or HIP driver: `bind` packs what never changes (function, block,
   shared memory, argument kinds) once and returns a builtin function, called as kernel(grid, stream, *args).

   Touches no driver library itself: driver.py opens it and passes the addresses of its functions, so that
   this file needs neither CUDA or HIP headers, nor torch, nor dlopen, and one build serves every CPython from
   3.11 on (limited API). Whichever of their headers it is built with, the binary is the same: no "#" formats,
   whose length type depends on the headers, no Py_INCREF and Py_DECREF, which newer headers expand otherwise.
   Build: cc -O2 -shared -fPIC -I<python include> _launch.c -o _launch.abi3.so */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAX_ARGUMENTS 96
#define MAX_SCRATCH 4
#define CAPSULE "_launch.Kernel"

/* cuLaunchKernel and hipModuleLaunchKernel have one signature; 0 is success for both vendors. */
typedef int (*launch_function)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                               void *stream, void **parameters, void **extra);
typedef int (*get_context_function)(void **context); /* cuCtxGetCurrent, cuCtxPopCurrent */
typedef int (*push_context_function)(void *context); /* cuCtxPushCurrent */
typedef int (*get_device_function)(int *device);     /* hipGetDevice */
typedef int (*set_device_function)(int device);      /* hipSetDevice */

enum stage { STAGE_LAUNCH, STAGE_ENTER, STAGE_LEAVE };

typedef struct {
    launch_function launch;
    get_context_function get_context, pop_context; /* CUDA; get_context is NULL for HIP */
    push_context_function push_context;
    get_device_function get_device; /* HIP */
    set_device_function set_device;
    void *context; /* CUDA: the device's primary context */
    int device;    /* HIP: the device's number */
    void *function;
    unsigned threads, shared_bytes;
    Py_ssize_t count, scratch; /* declared arguments, null pointers that follow them */
    char kinds[MAX_ARGUMENTS]; /* 'p' pointer, 'i' int32, 'l' int64 */
    PyObject *data_ptr;        /* "data_ptr" */
    PyObject *refuse;          /* refuse(position, value) raises; -1 the stream, -2 the grid, -3 the count */
    PyObject *fail;            /* fail(code, stage, grid, stream) raises */
} kernel_t;

typedef union {
    void *pointer;
    int32_t i32;
    int64_t i64;
} slot_t;

/* Launches in the kernel's own context or device, then puts the caller's back. Returns the first error. */
static int launch_in_context(const kernel_t *kernel, unsigned grid, void *stream, void **parameters,
                             enum stage *stage) {
    int code, left = 0, switched = 0, device = 0;
    void *current = NULL;
    *stage = STAGE_ENTER;
    if (kernel->get_context != NULL) {
        if ((code = kernel->get_context(&current)) != 0)
            return code;
        if (current != kernel->context) {
            if ((code = kernel->push_context(kernel->context)) != 0)
                return code;
            switched = 1;
        }
    } else {
        if ((code = kernel->get_device(&device)) != 0)
            return code;
        if (device != kernel->device) {
            if ((code = kernel->set_device(kernel->device)) != 0)
                return code;
            switched = 1;
        }
    }
    *stage = STAGE_LAUNCH;
    code = kernel->launch(kernel->function, grid, 1, 1, kernel->threads, 1, 1, kernel->shared_bytes, stream,
                          parameters, NULL);
    if (switched)
        left = kernel->get_context != NULL ? kernel->pop_context(&current) : kernel->set_device(device);
    if (code == 0 && left != 0) {
        *stage = STAGE_LEAVE;
        code = left;
    }
    return code;
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

static PyObject *kernel_call(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    const kernel_t *kernel = PyCapsule_GetPointer(self, CAPSULE);
    slot_t slots[MAX_ARGUMENTS];
    void *parameters[MAX_ARGUMENTS + MAX_SCRATCH];
    void *null = NULL, *stream;
    long long number;
    Py_ssize_t i;
    unsigned grid;
    enum stage stage;
    int code, ours;

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
        parameters[i] = &slots[i];
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
            slots[i].i32 = (int32_t)number;
        }
    }
    for (; i < kernel->count + kernel->scratch; i++)
        parameters[i] = &null;

    Py_BEGIN_ALLOW_THREADS; /* a full queue blocks the launch */
    code = launch_in_context(kernel, grid, stream, parameters, &stage);
    Py_END_ALLOW_THREADS;
    if (code != 0) {
        PyObject *result = PyObject_CallFunction(kernel->fail, "iiIK", code, (int)stage, grid,
                                                 (unsigned long long)(uintptr_t)stream);
        if (result != NULL) {
            Py_DecRef(result);
            PyErr_SetString(PyExc_SystemError, "_launch: fail() returned");
        }
        return NULL;
    }
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
    PyMem_Free(kernel);
}

static PyMethodDef kernel_method = {
    "kernel", (PyCFunction)(void (*)(void))kernel_call, METH_FASTCALL,
    "kernel(grid, stream, *args): launch `grid` blocks on the stream of handle `stream`."};

static void *address(unsigned long long number) { return (void *)(uintptr_t)number; }

static PyObject *bind(PyObject *module, PyObject *args) {
    const char *vendor, *kinds;
    unsigned long long launch, get, enter, leave, scope, function;
    unsigned threads, shared_bytes;
    Py_ssize_t count, scratch, i;
    PyObject *on_refuse, *on_fail, *capsule, *result;
    kernel_t *kernel;
    int cuda;

    (void)module;
    if (!PyArg_ParseTuple(args, "sKKKKKKIIsnOO", &vendor, &launch, &get, &enter, &leave, &scope, &function,
                          &threads, &shared_bytes, &kinds, &scratch, &on_refuse, &on_fail))
        return NULL;
    count = (Py_ssize_t)strlen(kinds);
    if (count > MAX_ARGUMENTS || scratch < 0 || scratch > MAX_SCRATCH)
        return PyErr_Format(PyExc_ValueError, "bind: %zd arguments and %zd scratch; at most %d and %d",
                            count, scratch, MAX_ARGUMENTS, MAX_SCRATCH);
    for (i = 0; i < count; i++)
        if (kinds[i] != 'p' && kinds[i] != 'i' && kinds[i] != 'l')
            return PyErr_Format(PyExc_ValueError, "bind: argument %zd has kind %d; 'p', 'i' or 'l' needed", i,
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
    kernel->scratch = scratch;
    for (i = 0; i < count; i++)
        kernel->kinds[i] = kinds[i];
    kernel->data_ptr = PyUnicode_InternFromString("data_ptr");
    Py_IncRef(on_refuse);
    kernel->refuse = on_refuse;
    Py_IncRef(on_fail);
    kernel->fail = on_fail;

    capsule = kernel->data_ptr == NULL ? NULL : PyCapsule_New(kernel, CAPSULE, kernel_free);
    if (capsule == NULL) {
        Py_DecRef(kernel->data_ptr);
        Py_DecRef(on_refuse);
        Py_DecRef(on_fail);
        PyMem_Free(kernel);
        return NULL;
    }
    result = PyCFunction_NewEx(&kernel_method, capsule, NULL);
    Py_DecRef(capsule);
    return result;
}

static PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS,
     "bind(vendor, launch, get, enter, leave, scope, function, threads, shared_bytes, kinds, scratch,\n"
     "refuse, fail) -> kernel. `vendor` is \"nvidia\" or \"amd\"; addresses and handles are ints; `kinds`\n"
     "has one of 'p', 'i', 'l' per argument."},
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
