/* Words: ASCII text split by tables, each piece's token ids looked up and put in a row.
 *
 * splitter(levels, seed) -> a splitter that knows no words. levels: (classes, table, width) of each expression, in turn
 *     applied to the pieces that the one before left (engine_adapter.automaton).
 * split(splitter, text) -> list of pieces: matches, and what lies between them.
 * encode(splitter, text, more) -> bytes of the ids (native uint32), or the list of the pieces that neither the splitter nor
 *     `more` (piece -> bytes of ids) knows.
 * add(splitter, word, ids) makes a word known. known(splitter) -> how many are.
 *
 * engine_adapter/words.py does the same with Python's expressions where this was not compiled; tests hold the two against
 * each other. All of it runs under the interpreter's lock: a splitter may be shared by threads.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CLASSES 129
#define END_CLASS 128
#define MATCHED 0x8000
#define START 1
#define MAX_LEVELS 8
#define NAME "keepwarm.splitter"

typedef struct {
    uint8_t classes[CLASSES];
    uint16_t *table;
    uint32_t width;
} Level;

/* A known word: its characters stand at `at` in the store, its ids behind them. */
typedef struct {
    uint64_t hash;
    uint32_t at;
    uint16_t chars, id_bytes; /* chars 0: an empty slot */
} Entry;

typedef struct {
    Level levels[MAX_LEVELS];
    int count;
    uint64_t seed;
    Entry *entries; /* open addressing, linear probing, at most half full */
    size_t capacity, words;
    uint8_t *store;
    size_t store_used, store_size;
} Splitter;

static void end_splitter(PyObject *capsule) {
    Splitter *s = PyCapsule_GetPointer(capsule, NAME);
    if (!s) return;
    for (int i = 0; i < s->count; i++) free(s->levels[i].table);
    free(s->entries);
    free(s->store);
    free(s);
}

/* Fills a level; a table that could lead outside itself is refused. */
static int take_level(Level *level, PyObject *given) {
    const char *classes, *table;
    Py_ssize_t class_bytes, table_bytes;
    long width;
    if (!PyArg_ParseTuple(given, "y#y#l", &classes, &class_bytes, &table, &table_bytes, &width)) return -1;
    if (class_bytes != CLASSES || width < 1 || width > CLASSES || table_bytes % (2 * width) || table_bytes < 4 * width) goto bad;
    Py_ssize_t states = table_bytes / (2 * width);
    for (int i = 0; i < CLASSES; i++)
        if ((uint8_t)classes[i] >= width) goto bad;
    level->table = malloc((size_t)table_bytes);
    if (!level->table) return PyErr_NoMemory(), -1;
    memcpy(level->table, table, (size_t)table_bytes);
    memcpy(level->classes, classes, CLASSES);
    level->width = (uint32_t)width;
    for (Py_ssize_t i = 0; i < states * width; i++)
        if ((level->table[i] & ~MATCHED) >= states) goto bad;
    return 0;
bad:
    PyErr_SetString(PyExc_ValueError, "no table of an expression");
    return -1;
}

static PyObject *splitter(PyObject *module, PyObject *args) {
    PyObject *levels;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "OK", &levels, &seed)) return NULL;
    Py_ssize_t count = PySequence_Size(levels);
    if (count < 0) return NULL;
    if (count > MAX_LEVELS) return PyErr_Format(PyExc_ValueError, "%zd expressions; at most %d", count, MAX_LEVELS);
    Splitter *s = calloc(1, sizeof *s);
    PyObject *capsule = s ? PyCapsule_New(s, NAME, end_splitter) : PyErr_NoMemory();
    if (!capsule) return free(s), NULL;
    s->seed = seed;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *level = PySequence_GetItem(levels, i);
        s->count = (int)i + 1; /* what is there of it goes with the capsule */
        int failed = !level || take_level(&s->levels[i], level) < 0;
        Py_XDECREF(level);
        if (failed) return Py_DECREF(capsule), NULL;
    }
    return capsule;
}

/* Returns where the match that begins at `from` ends; `from` where there is none. */
static const uint8_t *match_end(const Level *level, const uint8_t *from, const uint8_t *end) {
    const uint8_t *last = from;
    for (uint32_t state = START;; from++) {
        uint16_t entry = level->table[state * level->width + level->classes[from < end ? *from : END_CLASS]];
        if (entry & MATCHED) last = from;
        state = entry & (uint16_t)~MATCHED;
        if (!state || from == end) return last;
    }
}

/* Called with each piece; returns -1 to end the walk. */
typedef int (*Visit)(void *context, const uint8_t *piece, Py_ssize_t chars);

static int walk(const Splitter *s, int depth, const uint8_t *from, const uint8_t *end, Visit visit, void *context) {
    if (depth == s->count) return visit(context, from, end - from);
    const uint8_t *gap = from; /* where what no match took begins */
    while (from < end) {
        const uint8_t *stop = match_end(&s->levels[depth], from, end);
        if (stop == from) {
            from++;
            continue;
        }
        if (gap < from && walk(s, depth + 1, gap, from, visit, context) < 0) return -1;
        if (walk(s, depth + 1, from, stop, visit, context) < 0) return -1;
        gap = from = stop;
    }
    return gap < end ? walk(s, depth + 1, gap, end, visit, context) : 0;
}

static uint64_t hash_of(uint64_t seed, const uint8_t *chars, size_t count) {
    uint64_t h = seed ^ count, part;
    for (; count >= 8; chars += 8, count -= 8) {
        memcpy(&part, chars, 8);
        h = (h ^ part) * UINT64_C(0x9E3779B97F4A7C15);
        h ^= h >> 32;
    }
    part = 0;
    memcpy(&part, chars, count);
    h = (h ^ part) * UINT64_C(0x9E3779B97F4A7C15);
    return h ^ h >> 29;
}

/* Returns the word's entry, or the empty slot where it would stand; NULL while there are no slots. */
static Entry *entry_of(const Splitter *s, uint64_t hash, const uint8_t *word, size_t chars) {
    if (!s->capacity) return NULL;
    for (size_t i = hash & (s->capacity - 1);; i = (i + 1) & (s->capacity - 1)) {
        Entry *e = &s->entries[i];
        if (!e->chars || (e->hash == hash && e->chars == chars && !memcmp(s->store + e->at, word, chars))) return e;
    }
}

static int make_room(Splitter *s, size_t bytes) {
    if (2 * (s->words + 1) > s->capacity) {
        size_t capacity = s->capacity ? 2 * s->capacity : 1024;
        Entry *entries = calloc(capacity, sizeof *entries);
        if (!entries) return -1;
        for (size_t i = 0; i < s->capacity; i++) {
            if (!s->entries[i].chars) continue;
            size_t to = s->entries[i].hash & (capacity - 1);
            while (entries[to].chars) to = (to + 1) & (capacity - 1);
            entries[to] = s->entries[i];
        }
        free(s->entries);
        s->entries = entries;
        s->capacity = capacity;
    }
    if (s->store_used + bytes > s->store_size) {
        size_t size = 2 * (s->store_used + bytes) + 4096;
        uint8_t *store = size <= UINT32_MAX ? realloc(s->store, size) : NULL;
        if (!store) return -1;
        s->store = store;
        s->store_size = size;
    }
    return 0;
}

/* Returns the splitter and the characters of a text, which must be ASCII. */
static Splitter *with_text(PyObject *capsule, PyObject *text, const uint8_t **chars, Py_ssize_t *count) {
    Splitter *s = PyCapsule_GetPointer(capsule, NAME);
    if (!s) return NULL;
    *chars = (const uint8_t *)PyUnicode_AsUTF8AndSize(text, count);
    if (!*chars) return NULL;
    if (*count != PyUnicode_GetLength(text)) return PyErr_SetString(PyExc_ValueError, "the text is not ASCII"), NULL;
    return s;
}

static int append_piece(void *list, const uint8_t *piece, Py_ssize_t chars) {
    PyObject *text = PyUnicode_FromStringAndSize((const char *)piece, chars);
    int failed = !text || PyList_Append(list, text) < 0;
    Py_XDECREF(text);
    return failed ? -1 : 0;
}

static PyObject *split(PyObject *module, PyObject *args) {
    PyObject *capsule, *text;
    const uint8_t *chars;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "OU", &capsule, &text)) return NULL;
    Splitter *s = with_text(capsule, text, &chars, &count);
    PyObject *list = s ? PyList_New(0) : NULL;
    if (list && count && walk(s, 0, chars, chars + count, append_piece, list) < 0) Py_CLEAR(list);
    return list;
}

typedef struct {
    const Splitter *splitter;
    PyObject *more, *unknown; /* a list once there are any */
    uint8_t *ids;
    size_t used, size;
} Encoding;

static int put_ids(Encoding *e, const void *ids, size_t bytes) {
    if (e->used + bytes > e->size) {
        size_t size = 2 * (e->used + bytes);
        uint8_t *grown = realloc(e->ids, size);
        if (!grown) return PyErr_NoMemory(), -1;
        e->ids = grown;
        e->size = size;
    }
    memcpy(e->ids + e->used, ids, bytes);
    e->used += bytes;
    return 0;
}

static int encode_piece(void *context, const uint8_t *piece, Py_ssize_t chars) {
    Encoding *e = context;
    const Splitter *s = e->splitter;
    if (chars <= UINT16_MAX) {
        const Entry *known = entry_of(s, hash_of(s->seed, piece, (size_t)chars), piece, (size_t)chars);
        if (known && known->chars) return e->unknown ? 0 : put_ids(e, s->store + known->at + chars, known->id_bytes);
    }
    PyObject *word = PyUnicode_FromStringAndSize((const char *)piece, chars);
    if (!word) return -1;
    PyObject *ids = PyDict_GetItemWithError(e->more, word); /* borrowed */
    char *data;
    Py_ssize_t bytes;
    int failed = 0;
    if (ids)
        failed = PyBytes_AsStringAndSize(ids, &data, &bytes) < 0 || (!e->unknown && put_ids(e, data, (size_t)bytes) < 0);
    else if (PyErr_Occurred() || (!e->unknown && !(e->unknown = PyList_New(0))))
        failed = 1;
    else
        failed = PyList_Append(e->unknown, word) < 0;
    Py_DECREF(word);
    return failed ? -1 : 0;
}

static PyObject *encode(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    const uint8_t *chars;
    Py_ssize_t count;
    if (given != 3 || !PyUnicode_Check(args[1]) || !PyDict_Check(args[2]))
        return PyErr_SetString(PyExc_TypeError, "a splitter, a text and a dictionary expected"), NULL;
    Splitter *s = with_text(args[0], args[1], &chars, &count);
    if (!s) return NULL;
    Encoding e = {s, args[2], NULL, malloc((size_t)count + 64), 0, (size_t)count + 64};
    PyObject *result = NULL;
    if (!e.ids)
        PyErr_NoMemory();
    else if (!count || walk(s, 0, chars, chars + count, encode_piece, &e) == 0)
        result = e.unknown ? Py_NewRef(e.unknown) : PyBytes_FromStringAndSize((char *)e.ids, (Py_ssize_t)e.used);
    Py_XDECREF(e.unknown);
    free(e.ids);
    return result;
}

static PyObject *add(PyObject *module, PyObject *args) {
    PyObject *capsule, *text;
    const char *ids;
    const uint8_t *chars;
    Py_ssize_t bytes, count;
    if (!PyArg_ParseTuple(args, "OUy#", &capsule, &text, &ids, &bytes)) return NULL;
    Splitter *s = with_text(capsule, text, &chars, &count);
    if (!s) return NULL;
    if (!count || count > UINT16_MAX || bytes > UINT16_MAX)
        return PyErr_SetString(PyExc_ValueError, "a word of 1 to 65535 characters, and as many bytes of ids"), NULL;
    if (make_room(s, (size_t)(count + bytes)) < 0) return PyErr_NoMemory();
    uint64_t hash = hash_of(s->seed, chars, (size_t)count);
    Entry *entry = entry_of(s, hash, chars, (size_t)count);
    if (!entry->chars) {
        *entry = (Entry){hash, (uint32_t)s->store_used, (uint16_t)count, (uint16_t)bytes};
        memcpy(s->store + s->store_used, chars, (size_t)count);
        memcpy(s->store + s->store_used + count, ids, (size_t)bytes);
        s->store_used += (size_t)(count + bytes);
        s->words++;
    }
    Py_RETURN_NONE;
}

static PyObject *known(PyObject *module, PyObject *capsule) {
    Splitter *s = PyCapsule_GetPointer(capsule, NAME);
    return s ? PyLong_FromSize_t(s->words) : NULL;
}

static PyMethodDef methods[] = {
    {"splitter", splitter, METH_VARARGS, NULL},
    {"split", split, METH_VARARGS, NULL},
    {"encode", (PyCFunction)(void (*)(void))encode, METH_FASTCALL, NULL},
    {"add", add, METH_VARARGS, NULL},
    {"known", known, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_words", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__words(void) { return PyModule_Create(&module); }
