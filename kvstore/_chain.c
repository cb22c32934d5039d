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

#if !defined(__SIZEOF_INT128__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "this loop is for little-endian machines with 128-bit products; keepwarm does without it elsewhere"
#endif

#define LONGEST 240
#define PRIME_1 UINT64_C(0x9E3779B185EBCA87)

/* The first 192 pseudo-random bytes of the specification's default secret. */
static const uint8_t secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

static inline uint32_t read32(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, 4);
    return value;
}

static inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t h) {
    h = (h ^ h >> 37) * UINT64_C(0x165667919E3779F9);
    return h ^ h >> 32;
}

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
    uint64_t sum = len * PRIME_1;
    for (size_t i = (len - 1) / 32 + 1; i--;)
        sum += mix16(in + 16 * i, secret + 32 * i, seed) + mix16(in + len - 16 * (i + 1), secret + 32 * i + 16, seed);
    return avalanche(sum);
}

static inline uint64_t hash129to240(const uint8_t *in, size_t len, uint64_t seed) {
    uint64_t sum = len * PRIME_1;
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
