/* What both stand-in driver libraries share: a log of calls, settings that a test may change, and the
   decoding of kernel arguments. The log is text, one call a line; the settings are ints by name. */
#ifndef STANDIN_H
#define STANDIN_H
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define STANDIN_API __attribute__((visibility("default")))

static pthread_mutex_t standin_mutex = PTHREAD_MUTEX_INITIALIZER;
static char standin_text[1 << 18];
static size_t standin_used;
static char standin_arguments[128]; /* kinds of the next launches' arguments, scratch included: p, i, l, m */

static struct setting {
    const char *name;
    int value, initial;
} standin_settings[] = {
    {"devices", 2, 2},     {"major", 9, 9},           {"minor", 0, 0},         {"multiprocessors", 132, 132},
    {"shared", 0, 0},      {"max_threads", 1024, 1024}, {"capturing", 0, 0},     {"fail_init", 0, 0},
    {"fail_load", 0, 0},   {"fail_function", 0, 0},   {"fail_launch", 0, 0},   {"fail_enter", 0, 0},
    {"fail_leave", 0, 0},  {"fail_capturing", 0, 0},  {"fail_encode", 0, 0},   {"record", 1, 1},
    {"version", 13000, 13000},
};

static int *standin_find(const char *name) {
    for (size_t i = 0; i < sizeof standin_settings / sizeof *standin_settings; i++)
        if (strcmp(standin_settings[i].name, name) == 0)
            return &standin_settings[i].value;
    return NULL;
}

static int standin_get(const char *name) { return *standin_find(name); }

STANDIN_API int standin_set(const char *name, int value) {
    int *setting = standin_find(name);
    if (setting == NULL)
        return -1;
    *setting = value;
    return 0;
}

STANDIN_API void standin_reset(void) {
    for (size_t i = 0; i < sizeof standin_settings / sizeof *standin_settings; i++)
        standin_settings[i].value = standin_settings[i].initial;
    standin_used = 0;
    standin_text[0] = 0;
    standin_arguments[0] = 0;
}

STANDIN_API const char *standin_log(void) { return standin_text; }

STANDIN_API void standin_kinds(const char *kinds) {
    snprintf(standin_arguments, sizeof standin_arguments, "%s", kinds);
}

static void standin_record(const char *format, ...) {
    va_list values;
    if (!*standin_find("record"))
        return;
    pthread_mutex_lock(&standin_mutex);
    va_start(values, format);
    size_t room = sizeof standin_text - standin_used;
    int wrote = vsnprintf(standin_text + standin_used, room, format, values);
    va_end(values);
    if (wrote > 0 && (size_t)wrote < room)
        standin_used += (size_t)wrote;
    pthread_mutex_unlock(&standin_mutex);
}

static void standin_launch(const char *name, void *function, unsigned gx, unsigned gy, unsigned gz,
                           unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                           void **parameters, void **extra, const char *where) {
    char text[4096];
    size_t used = 0;
    if (!*standin_find("record"))
        return;
    text[0] = 0;
    for (size_t i = 0; standin_arguments[i]; i++) {
        long long value = 0;
        if (standin_arguments[i] == 'p')
            value = (long long)*(uint64_t *)parameters[i];
        else if (standin_arguments[i] == 'm') /* 128 bytes of a map: whole only if both ends agree */
            value = ((uint64_t *)parameters[i])[0] == ((uint64_t *)parameters[i])[15] ? *(int64_t *)parameters[i] : -1;
        else if (standin_arguments[i] == 'i')
            value = *(int32_t *)parameters[i];
        else
            value = *(int64_t *)parameters[i];
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%lld", i ? "," : "", value);
    }
    standin_record("%s function=%#llx grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%#llx extra=%d on=%s "
                   "args=%s\n",
                   name, (unsigned long long)(uintptr_t)function, gx, gy, gz, bx, by, bz, shared,
                   (unsigned long long)(uintptr_t)stream, extra != NULL, where, text);
}
#endif
