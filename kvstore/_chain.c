/* chain(data, width, previous) -> bytes: hashes of the whole blocks of `width` bytes in `data`, each seeded by the one before.
 *
 * The hash is XXH3 (64 bits, seeded), as its specification gives it for inputs of 4 to 240 bytes:
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md (Yann Collet, BSD 2-Clause). Calling a hash library from
 * Python costs ten times what hashing 64 bytes does. kvstore/block.py does longer blocks, and all where this was not
 * compiled, with the xxhash library; tests hold the two against each other.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_xxh3.h"

#define LONGEST 240
static inline uint32_t read32(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, 4);
    return value;
}

static inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t mix16(const uint8_t *in, const uint8_t *key, uint64_t seed) {
    return fold(read64(in) ^ (read64(key) + seed), read64(in + 8) ^ (read64(key + 8) - seed));
}

static inline uint64_t hash4to8(const uint8_t *in, size_t len, uint64_t seed) {
    seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
    uint64_t h = (read32(in + len - 4) + ((uint64_t)read32(in) << 32)) ^ ((read64(secret + 8) ^ read64(secret + 16)) - seed);
    h ^= rotate(h, 49) ^ rotate(h, 24);
    h *= UINT64_C(0x9FB21C651E98DF25);
    h ^= (h >> 35) + len;
    h *= UINT64_C(0x9FB21C651E98DF25);
    return h ^ h >> 28;
}

static inline uint64_t hash9to16(const uint8_t *in, size_t len, uint64_t seed) {
    uint64_t low = read64(in) ^ ((read64(secret + 24) ^ read64(secret + 32)) + seed);
    uint64_t high = read64(in + len - 8) ^ ((read64(secret + 40) ^ read64(secret + 48)) - seed);
    return avalanche(len + __builtin_bswap64(low) + high + fold(low, high));
}

static inline uint64_t hash17to128(const uint8_t *in, size_t len, uint64_t seed) {
    uint64_t sum = len * P64_1;
    for (size_t i = (len - 1) / 32 + 1; i--;)
        sum += mix16(in + 16 * i, secret + 32 * i, seed) + mix16(in + len - 16 * (i + 1), secret + 32 * i + 16, seed);
    return avalanche(sum);
}

static inline uint64_t hash129to240(const uint8_t *in, size_t len, uint64_t seed) {
    uint64_t sum = len * P64_1;
    for (size_t i = 0; i < 8; i++) sum += mix16(in + 16 * i, secret + 16 * i, seed);
    sum = avalanche(sum);
    for (size_t i = 8; i < len / 16; i++) sum += mix16(in + 16 * i, secret + 16 * (i - 8) + 3, seed);
    return avalanche(sum + mix16(in + len - 16, secret + 136 - 17, seed));
}

static PyObject *chain(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 3) return PyErr_Format(PyExc_TypeError, "3 arguments expected, %zd given", given);
    Py_ssize_t width = PyLong_AsSsize_t(args[1]);
    uint64_t previous = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (width < 4 || width > LONGEST) return PyErr_Format(PyExc_ValueError, "width %zd is not in 4 … 240", width);
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0) return NULL;
    Py_ssize_t count = view.len / width;
    PyObject *result = PyBytes_FromStringAndSize(NULL, 8 * count);
    char *out = result ? PyBytes_AsString(result) : NULL;
    const uint8_t *in = view.buf;
    size_t len = (size_t)width;
    for (Py_ssize_t i = 0; out && i < count; i++, in += len, out += 8) {
        previous = len <= 8 ? hash4to8(in, len, previous)
                   : len <= 16 ? hash9to16(in, len, previous)
                   : len <= 128 ? hash17to128(in, len, previous)
                                : hash129to240(in, len, previous);
        memcpy(out, &previous, 8);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyMethodDef methods[] = {{"chain", (PyCFunction)(void (*)(void))chain, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_chain", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__chain(void) { return PyModule_Create(&module); }
