/* A stand-in for libamdhip64.so: records the calls of the launcher and answers as the tests tell it. Declared
   by the real hip_runtime_api.h, so that the compiler checks every prototype and lays out the properties.
   Build: cc -shared -fPIC -D__HIP_PLATFORM_AMD__ -I<folder of hip/> libamdhip64.c -o libamdhip64.so */
#include <hip/hip_runtime_api.h>

#include "standin.h"

static __thread int current; /* as in HIP, a new thread is on device 0 */
static int functions;

hipError_t hipInit(unsigned flags) {
    standin_record("hipInit %u\n", flags);
    return (hipError_t)standin_get("fail_init");
}

hipError_t hipGetDeviceProperties(hipDeviceProp_t *properties, int device) {
    int shared = standin_get("shared");
    if (device < 0 || device >= standin_get("devices"))
        return hipErrorInvalidDevice;
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "Stand-in Instinct %d", device);
    snprintf(properties->gcnArchName, sizeof properties->gcnArchName, "gfx%d%02x:sramecc+:xnack-",
             standin_get("major"), (unsigned)standin_get("minor"));
    properties->multiProcessorCount = standin_get("multiprocessors");
    properties->sharedMemPerBlock = (size_t)(shared ? shared : 64 << 10);
    properties->warpSize = 64;
    return hipSuccess;
}

hipError_t hipGetDevice(int *device) {
    *device = current;
    return hipSuccess;
}

hipError_t hipSetDevice(int device) {
    standin_record("set %d\n", device);
    if (standin_get("fail_enter"))
        return (hipError_t)standin_get("fail_enter");
    current = device;
    return hipSuccess;
}

hipError_t hipModuleLoadData(hipModule_t *module, const void *image) {
    standin_record("hipModuleLoadData %.24s on=%d\n", (const char *)image, current);
    if (standin_get("fail_load"))
        return (hipError_t)standin_get("fail_load");
    *module = (hipModule_t)0x2000;
    return hipSuccess;
}

hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name) {
    standin_record("hipModuleGetFunction %s\n", name);
    if (module != (hipModule_t)0x2000 || standin_get("fail_function"))
        return hipErrorNotFound;
    *function = (hipFunction_t)(uintptr_t)(0xF000 + __sync_fetch_and_add(&functions, 1));
    return hipSuccess;
}

hipError_t hipFuncGetAttribute(int *value, hipFunction_attribute attribute, hipFunction_t function) {
    if (function == NULL || attribute != HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        return hipErrorInvalidValue;
    *value = standin_get("max_threads");
    return hipSuccess;
}

hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus *status) {
    standin_record("hipStreamIsCapturing %#llx on=%d\n", (unsigned long long)(uintptr_t)stream, current);
    if (standin_get("fail_capturing"))
        return (hipError_t)standin_get("fail_capturing");
    *status = (hipStreamCaptureStatus)standin_get("capturing");
    return hipSuccess;
}

hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                 unsigned by, unsigned bz, unsigned shared, hipStream_t stream,
                                 void **parameters, void **extra) {
    char where[16];
    if (standin_get("fail_launch"))
        return (hipError_t)standin_get("fail_launch");
    snprintf(where, sizeof where, "%d", current);
    standin_launch("hipModuleLaunchKernel", function, gx, gy, gz, bx, by, bz, shared, stream, parameters,
                   extra, where);
    return hipSuccess;
}

const char *hipGetErrorName(hipError_t error) {
    switch (error) {
    case hipErrorInvalidValue:
        return "hipErrorInvalidValue";
    case hipErrorInvalidDevice:
        return "hipErrorInvalidDevice";
    case hipErrorNotFound:
        return "hipErrorNotFound";
    default:
        return "hipErrorUnknown";
    }
}
