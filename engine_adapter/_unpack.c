/* unpack(payload) -> object: msgpack, with long arrays of integers kept packed. See engine_adapter/unpack.py, which defines
 * what comes out and does the same where no compiler was at hand. A KV event is mostly token ids: making a Python integer
 * of each costs more than all the rest of the way from the wire into the index.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define BIG_ENDIAN_64(x) __builtin_bswap64(x)
#else
#define BIG_ENDIAN_64(x) (x)
#endif

#define MAX_DEPTH 32
#define MIN_PACKED 8

typedef struct {
    const uint8_t *at, *end;
    PyObject *array_type; /* array.array */
    int depth;
} Reader;

static PyObject *read_value(Reader *r);

static PyObject *fail(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

static uint64_t big_endian(const uint8_t *p, int width) {
    uint64_t value = 0;
    while (width--) value = value << 8 | *p++;
    return value;
}

/* Read an integer as its 64 bits; `negative` tells how to read them. Returns 0 and leaves `r` alone if it is none. */
static inline int read_bits(Reader *r, uint64_t *bits, int *negative) {
    if (r->at >= r->end) return 0;
    uint8_t tag = *r->at;
    *negative = 0;
    if (tag <= 0x7f) {
        *bits = tag;
        r->at++;
        return 1;
    }
    if (tag >= 0xe0) {
        *bits = (uint64_t)(int64_t)(int8_t)tag;
        *negative = 1;
        r->at++;
        return 1;
    }
    if (tag < 0xcc || tag > 0xd3) return 0;
    int width = 1 << ((tag - 0xcc) & 3);
    if (r->end - r->at <= width) return 0;
    uint64_t value = big_endian(r->at + 1, width);
    if (tag >= 0xd0) { /* signed */
        if (width < 8) value = (uint64_t)((int64_t)(value << (64 - 8 * width)) >> (64 - 8 * width));
        *negative = (int64_t)value < 0;
    }
    *bits = value;
    r->at += 1 + width;
    return 1;
}

/* How many bytes follow the tag of a non-negative integer; 9: not one of those, read_bits will tell. */
static const uint8_t tail[256] = {
    [0x80 ... 0xcb] = 9, [0xcc] = 1, [0xcd] = 2, [0xce] = 4, [0xcf] = 8, [0xd0 ... 0xff] = 9,
};

/* The common case without a branch that depends on the data: token ids come in two or three widths, at random. */
static uint64_t read_run(Reader *r, uint64_t *values, uint64_t count) {
    const uint8_t *at = r->at;
    uint64_t i = 0;
    for (; i < count && r->end - at > 8 && tail[*at] <= 8; i++) { /* a tag and eight bytes can be read */
        uint64_t tag = *at, width = tail[tag], is_tag = (uint64_t)(width != 0) - 1, word; /* all ones for a small one */
        memcpy(&word, at + 1, 8);
        word = BIG_ENDIAN_64(word) >> ((64 - 8 * width) & 63);
        values[i] = (word & ~is_tag) | (tag & is_tag);
        at += 1 + width;
    }
    r->at = at;
    return i;
}

/* Return array('I' or 'Q') of `count` integers, or Py_None with `r` unmoved if one of the items is something else. */
static PyObject *read_packed(Reader *r, uint64_t count) {
    const uint8_t *start = r->at;
    PyObject *wide = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * 8));
    if (!wide) return NULL;
    uint64_t *values = (uint64_t *)PyBytes_AsString(wide), all = 0;
    for (uint64_t i = 0; i < count; i++) {
        int negative;
        i += read_run(r, values + i, count - i);
        if (i == count) break;
        if (!read_bits(r, &values[i], &negative)) {
            r->at = start;
            Py_DECREF(wide);
            return Py_NewRef(Py_None);
        }
    }
    for (uint64_t i = 0; i < count; i++) all |= values[i];
    PyObject *data = wide, *result = NULL;
    if (all <= UINT32_MAX) {
        data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * 4));
        uint32_t *narrow = data ? (uint32_t *)PyBytes_AsString(data) : NULL;
        for (uint64_t i = 0; narrow && i < count; i++) narrow[i] = (uint32_t)values[i];
    }
    if (data) result = PyObject_CallFunction(r->array_type, "CO", all <= UINT32_MAX ? 'I' : 'Q', data);
    if (data != wide) Py_XDECREF(data);
    Py_DECREF(wide);
    return result;
}

static PyObject *read_array(Reader *r, uint64_t count) {
    if (count > (uint64_t)(r->end - r->at)) return fail("an array runs past the end");
    if (count >= MIN_PACKED) {
        PyObject *packed = read_packed(r, count);
        if (packed != Py_None) return packed;
        Py_DECREF(packed);
    }
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (uint64_t i = 0; list && i < count; i++) {
        PyObject *item = read_value(r);
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *read_map(Reader *r, uint64_t count) {
    if (count > (uint64_t)(r->end - r->at) / 2) return fail("a map runs past the end");
    PyObject *map = PyDict_New();
    for (uint64_t i = 0; map && i < count; i++) {
        PyObject *key = read_value(r), *value = key ? read_value(r) : NULL;
        if (!value || PyDict_SetItem(map, key, value) < 0) Py_CLEAR(map);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return map;
}

static PyObject *read_bytes(Reader *r, uint64_t length, int kind) {
    if (length > (uint64_t)(r->end - r->at)) return fail("a string runs past the end");
    const char *start = (const char *)r->at;
    r->at += length;
    if (kind == 's') return PyUnicode_DecodeUTF8(start, (Py_ssize_t)length, NULL);
    return kind == 'b' ? PyBytes_FromStringAndSize(start, (Py_ssize_t)length) : Py_NewRef(Py_None);
}

static PyObject *read_tagged(Reader *r) {
    uint64_t bits;
    int negative;
    if (read_bits(r, &bits, &negative))
        return negative ? PyLong_FromLongLong((long long)bits) : PyLong_FromUnsignedLongLong(bits);
    if (r->at >= r->end) return fail("the input ends too early");
    uint8_t tag = *r->at++;
    if (tag >= 0xa0 && tag <= 0xbf) return read_bytes(r, tag & 31, 's');
    if (tag >= 0x90 && tag <= 0x9f) return read_array(r, tag & 15);
    if (tag >= 0x80 && tag <= 0x8f) return read_map(r, tag & 15);
    static const int8_t widths[32] = {0, -1, 0, 0, 1, 2, 4, 1, 2, 4, 4, 8, -1, -1, -1, -1,
                                      -1, -1, -1, -1, 0, 0, 0, 0, 0, 1, 2, 4, 2, 4, 2, 4};
    int width = widths[tag - 0xc0];
    if (width < 0 || r->end - r->at < width) return fail("the input ends too early, or is no msgpack");
    uint64_t n = big_endian(r->at, width);
    r->at += width;
    switch (tag) {
        case 0xc0: Py_RETURN_NONE;
        case 0xc2: Py_RETURN_FALSE;
        case 0xc3: Py_RETURN_TRUE;
        case 0xc4: case 0xc5: case 0xc6: return read_bytes(r, n, 'b');
        case 0xc7: case 0xc8: case 0xc9: return read_bytes(r, n + 1, 'x');
        case 0xca: {
            uint32_t word = (uint32_t)n;
            float value;
            memcpy(&value, &word, 4);
            return PyFloat_FromDouble(value);
        }
        case 0xcb: {
            double value;
            memcpy(&value, &n, 8);
            return PyFloat_FromDouble(value);
        }
        case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8:
            return read_bytes(r, 1 + ((uint64_t)1 << (tag - 0xd4)), 'x');
        case 0xd9: case 0xda: case 0xdb: return read_bytes(r, n, 's');
        case 0xdc: case 0xdd: return read_array(r, n);
        default: return read_map(r, n);
    }
}

static PyObject *read_value(Reader *r) {
    if (++r->depth > MAX_DEPTH) return fail("nested too deeply");
    PyObject *value = read_tagged(r);
    r->depth--;
    return value;
}

static PyObject *unpack(PyObject *module, PyObject *payload) {
    Py_buffer view;
    if (PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE) < 0) return NULL;
    Reader reader = {view.buf, (const uint8_t *)view.buf + view.len, NULL, 0};
    PyObject *value = NULL, *arrays = PyImport_ImportModule("array");
    if (arrays) reader.array_type = PyObject_GetAttrString(arrays, "array");
    if (reader.array_type) value = read_value(&reader);
    if (value && reader.at != reader.end) {
        Py_CLEAR(value);
        fail("bytes are left over");
    }
    Py_XDECREF(reader.array_type);
    Py_XDECREF(arrays);
    PyBuffer_Release(&view);
    return value;
}

static PyMethodDef methods[] = {{"unpack", unpack, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_unpack", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__unpack(void) { return PyModule_Create(&module); }
