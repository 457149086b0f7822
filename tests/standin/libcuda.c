/* A stand-in for libcuda.so.1: records the calls of the launcher and answers as the tests tell it. Declared
   by the real cuda.h, so that the compiler checks every prototype.
   Build: cc -shared -fPIC -I<folder of cuda.h> libcuda.c -o libcuda.so.1 */
#include <cuda.h>

#include "standin.h"

#define CONTEXT(device) ((CUcontext)(uintptr_t)(0x1000 + (device)))
#define MAX_DEPTH 16

static __thread CUcontext stack[MAX_DEPTH];
static __thread int depth;
static int functions, maps;

static CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }

static int device_of(CUcontext context) { return context ? (int)((uintptr_t)context - 0x1000) : -1; }

CUresult cuInit(unsigned flags) {
    standin_record("cuInit %u\n", flags);
    return (CUresult)standin_get("fail_init");
}

CUresult cuDriverGetVersion(int *version) {
    *version = standin_get("version");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= standin_get("devices"))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    snprintf(name, (size_t)length, "Stand-in GPU %d", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    int major = standin_get("major"), minor = standin_get("minor"), shared = standin_get("shared");
    int usual = major == 8 && minor == 0 ? 163 : major == 8 || major == 12 ? 99 : 227; /* KB */
    (void)device;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = standin_get("multiprocessors");
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = major;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = minor;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        *value = 32;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = shared ? shared : usual << 10;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    standin_record("cuDevicePrimaryCtxRetain %d\n", device);
    *context = CONTEXT(device);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current();
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    standin_record("push %d\n", device_of(context));
    if (standin_get("fail_enter"))
        return (CUresult)standin_get("fail_enter");
    if (context == NULL || depth == MAX_DEPTH)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    standin_record("pop %d\n", device_of(current()));
    if (standin_get("fail_leave"))
        return (CUresult)standin_get("fail_leave");
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[--depth];
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    standin_record("cuModuleLoadData %.24s on=%d\n", (const char *)image, device_of(current()));
    if (current() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (standin_get("fail_load"))
        return (CUresult)standin_get("fail_load");
    *module = (CUmodule)0x2000;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    standin_record("cuModuleGetFunction %s\n", name);
    if (module != (CUmodule)0x2000 || standin_get("fail_function"))
        return CUDA_ERROR_NOT_FOUND;
    *function = (CUfunction)(uintptr_t)(0xF000 + __sync_fetch_and_add(&functions, 1));
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    if (function == NULL || attribute != CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        return CUDA_ERROR_INVALID_VALUE;
    *value = standin_get("max_threads");
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (function == NULL || attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    standin_record("dynamic shared memory %d\n", value);
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    standin_record("cuStreamIsCapturing %#llx on=%d\n", (unsigned long long)(uintptr_t)stream,
                   device_of(current()));
    if (standin_get("fail_capturing"))
        return (CUresult)standin_get("fail_capturing");
    *status = (CUstreamCaptureStatus)standin_get("capturing");
    return CUDA_SUCCESS;
}

/* The map holds the number of the call that made it, so that a launch shows which one it was given. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    char sizes[128] = "", distances[128] = "", boxes[128] = "";
    if (standin_get("fail_encode") == (int)rank)
        return CUDA_ERROR_INVALID_VALUE;
    if ((uintptr_t)map % 64 || current() == NULL || interleave || fill)
        return CUDA_ERROR_INVALID_CONTEXT;
    for (cuuint32_t i = 0; i < rank; i++) {
        snprintf(sizes + strlen(sizes), 24, "%s%llu", i ? "," : "", (unsigned long long)extents[i]);
        snprintf(boxes + strlen(boxes), 24, "%s%u", i ? "," : "", box[i] * steps[i]);
        if (i + 1 < rank)
            snprintf(distances + strlen(distances), 24, "%s%llu", i ? "," : "", (unsigned long long)strides[i]);
    }
    memset(map, 0, sizeof *map);
    map->opaque[0] = map->opaque[15] = (cuuint64_t)++maps;
    standin_record("encode map=%d type=%d address=%llu extents=%s strides=%s box=%s swizzle=%d promotion=%d\n",
                   maps, type, (unsigned long long)(uintptr_t)address, sizes, distances, boxes, swizzle, promotion);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void **parameters, void **extra) {
    char where[16];
    if (current() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (standin_get("fail_launch"))
        return (CUresult)standin_get("fail_launch");
    snprintf(where, sizeof where, "%d", device_of(current()));
    standin_launch("cuLaunchKernel", function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra,
                   where);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    char where[16];
    if (current() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (standin_get("fail_launch"))
        return (CUresult)standin_get("fail_launch");
    if (config->numAttrs != 1 || config->attrs[0].id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
        config->attrs[0].value.programmaticStreamSerializationAllowed != 1)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(where, sizeof where, "%d", device_of(current()));
    standin_launch("cuLaunchKernelEx", function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                   config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, parameters, extra, where);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    switch (error) {
    case CUDA_ERROR_INVALID_VALUE:
        *name = "CUDA_ERROR_INVALID_VALUE";
        return CUDA_SUCCESS;
    case CUDA_ERROR_NO_DEVICE:
        *name = "CUDA_ERROR_NO_DEVICE";
        return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_DEVICE:
        *name = "CUDA_ERROR_INVALID_DEVICE";
        return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_CONTEXT:
        *name = "CUDA_ERROR_INVALID_CONTEXT";
        return CUDA_SUCCESS;
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
        *name = "CUDA_ERROR_NO_BINARY_FOR_GPU";
        return CUDA_SUCCESS;
    case CUDA_ERROR_NOT_FOUND:
        *name = "CUDA_ERROR_NOT_FOUND";
        return CUDA_SUCCESS;
    case CUDA_ERROR_ILLEGAL_ADDRESS:
        *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
        return CUDA_SUCCESS;
    default:
        *name = NULL;
        return CUDA_ERROR_INVALID_VALUE;
    }
}
